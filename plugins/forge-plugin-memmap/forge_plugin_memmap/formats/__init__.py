"""Formats of files of token ids, the components of kind `token_format`: one format per module."""

from forge_plugin_memmap.formats.arrow import Arrow
from forge_plugin_memmap.formats.auto import Auto
from forge_plugin_memmap.formats.datatrove import Datatrove
from forge_plugin_memmap.formats.dolma import Dolma
from forge_plugin_memmap.formats.forge import ForgeTokens
from forge_plugin_memmap.formats.json_lines import JsonLines
from forge_plugin_memmap.formats.kind import Candidate, TokenFormat
from forge_plugin_memmap.formats.litdata import LitData
from forge_plugin_memmap.formats.llm_c import LlmC
from forge_plugin_memmap.formats.mds import Mds
from forge_plugin_memmap.formats.megatron import Megatron
from forge_plugin_memmap.formats.npy import Npy
from forge_plugin_memmap.formats.parquet import Parquet
from forge_plugin_memmap.formats.raw import Raw

__all__ = [
    "Arrow",
    "Auto",
    "Candidate",
    "Datatrove",
    "Dolma",
    "ForgeTokens",
    "JsonLines",
    "LitData",
    "LlmC",
    "Mds",
    "Megatron",
    "Npy",
    "Parquet",
    "Raw",
    "TokenFormat",
]
