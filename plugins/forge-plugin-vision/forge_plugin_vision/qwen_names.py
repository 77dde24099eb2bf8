"""Weights of Hugging Face's Qwen2_5_VLForConditionalGeneration and Qwen3VLForConditionalGeneration, both ways.

Their counterpart is `vision_language` with `transformer`, `qwen_vit`, `merger` and `joint`. Tensors are the same but
for the projection of patches, which is a convolution (W, channels, frames, rows, columns) there and a matrix here.
`forge-run weights` reads and writes whole models by these tables.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from forge_core import deprecated
from forge_plugin_transformer import huggingface_names

if TYPE_CHECKING:
    from torch import Tensor

    from forge_plugin_vision.kinds import ImageFormat

Family = Literal["qwen2_5_vl", "qwen3_vl"]

ENDS: Mapping[str, str] = {"encoder.patch": "patch_embed.proj", "encoder.positions": "pos_embed"}
BLOCK: Mapping[str, str] = {
    "attention_norm": "norm1",
    "qkv": "attn.qkv",
    "o": "attn.proj",
    "ffn_norm": "norm2",
    "ffn.gate": "mlp.gate_proj",
}
"""Modules of a block of the tower, by their name of each; `FAMILIES` has those that differ."""
FAMILIES: Mapping[Family, tuple[Mapping[str, str], Mapping[str, str]]] = {
    "qwen2_5_vl": (
        {"ffn.up": "mlp.up_proj", "ffn.down": "mlp.down_proj"},
        {"norm": "ln_q", "up": "mlp.0", "down": "mlp.2"},
    ),
    "qwen3_vl": (
        {"ffn.up": "mlp.linear_fc1", "ffn.down": "mlp.linear_fc2"},
        {"norm": "norm", "up": "linear_fc1", "down": "linear_fc2"},
    ),
}
"""Modules of a block, and modules of a merger, that each model names in its own way."""

_OURS = re.compile(r"vision\.(encoder\.blocks\.\d+\.|adapter\.|deepstack\.\d+\.|)(.+)\.(weight|bias)")
_THEIRS = re.compile(r"(?:model\.)?visual\.(blocks\.\d+\.|merger\.|deepstack_merger_list\.\d+\.|)(.+)\.(weight|bias)")
_FOLDERS = (("encoder.blocks", "blocks"), ("adapter", "merger"), ("deepstack", "deepstack_merger_list"))


def from_huggingface(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a state of either model by the names of Forge.

    Args:
        state: tensors by name, as of `state_dict()` or of the published files.

    Raises:
        KeyError: Forge has no such parameter.
    """
    _warn("from_huggingface", "forge-run weights import")
    return {_name_of_ours(name): tensor.flatten(1) if tensor.ndim == 5 else tensor for name, tensor in state.items()}


def to_huggingface(state: Mapping[str, Tensor], family: Family, form: ImageFormat) -> dict[str, Tensor]:
    """Returns a state of Forge by the names of `state_dict()` of one of the models.

    Args:
        state: tensors by name.
        family: which of the models.
        form: the encoder's `image_format()`.

    Raises:
        KeyError: the model has no such parameter.
    """
    _warn("to_huggingface", "forge-run weights export")
    patch = (-1, form.channels, form.frames, form.patch, form.patch)
    return {
        _name_of_theirs(name, family): tensor.view(patch) if name == "vision.encoder.patch.weight" else tensor
        for name, tensor in state.items()
    }


def _warn(name: str, instead: str) -> None:
    warnings.warn(deprecated(f"qwen_names.{name}", "0.4", f"use {instead}"), stacklevel=3)


def _name_of_ours(name: str) -> str:
    match = _THEIRS.fullmatch(name)
    if match is None:
        return huggingface_names.from_huggingface(name.replace("model.language_model.", "model.", 1))
    folder, module, tensor = match.groups()
    found = {table[module] for family in FAMILIES if module in (table := _inverse(_table(folder, family)))}
    if not found:
        raise KeyError(f"no counterpart for parameter {name!r}")
    for ours, theirs in _FOLDERS:
        folder = re.sub(rf"^{theirs}\.", f"{ours}.", folder)
    return f"vision.{folder}{found.pop()}.{tensor}"


def _name_of_theirs(name: str, family: Family) -> str:
    match = _OURS.fullmatch(name)
    if match is None:
        return huggingface_names.to_huggingface(name).replace("model.", "model.language_model.", 1)
    folder, module, tensor = match.groups()
    table = _table(folder, family)
    if module not in table:
        raise KeyError(f"no counterpart for parameter {name!r} in {family}")
    for ours, theirs in _FOLDERS:
        folder = re.sub(rf"^{re.escape(ours)}\.", f"{theirs}.", folder)
    return f"model.visual.{folder}{table[module]}.{tensor}"


def _table(folder: str, family: Family) -> Mapping[str, str]:
    """Returns names of modules in a folder of the tower, of either side: a block, a merger or the tower itself."""
    block, merger = FAMILIES[family]
    if not folder:
        return ENDS
    return {**BLOCK, **block} if "blocks." in folder else merger


def _inverse(table: Mapping[str, str]) -> dict[str, str]:
    return {theirs: ours for ours, theirs in table.items()}
