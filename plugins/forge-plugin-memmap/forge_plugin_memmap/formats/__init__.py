"""Formats of files of token ids, the components of kind `token_format`: one format per module."""

from forge_plugin_memmap.formats.auto import Auto
from forge_plugin_memmap.formats.datatrove import Datatrove
from forge_plugin_memmap.formats.dolma import Dolma
from forge_plugin_memmap.formats.forge import ForgeTokens
from forge_plugin_memmap.formats.kind import Candidate, TokenFormat
from forge_plugin_memmap.formats.llm_c import LlmC
from forge_plugin_memmap.formats.megatron import Megatron
from forge_plugin_memmap.formats.npy import Npy
from forge_plugin_memmap.formats.raw import Raw

__all__ = [
    "Auto",
    "Candidate",
    "Datatrove",
    "Dolma",
    "ForgeTokens",
    "LlmC",
    "Megatron",
    "Npy",
    "Raw",
    "TokenFormat",
]
