"""Converts parameter names between `transformer` and Hugging Face's LlamaForCausalLM and Qwen3ForCausalLM.

Multi-token prediction, which those models do not have, is named as in the weights of DeepSeek-V3.

The tensors themselves are the same: shapes, and the half-split order of rotary dimensions, agree.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

ENDS: Mapping[str, str] = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
PARTS: Mapping[str, str] = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
"""Modules of a layer, by Hugging Face's name of each."""

PREDICTION: Mapping[str, str] = {
    "embedding_norm": "enorm",
    "hidden_norm": "hnorm",
    "projection": "eh_proj",
    "norm": "shared_head.norm",
}
"""Modules of multi-token prediction in addition to a layer's modules, as named in DeepSeek-V3's weights."""
COPIES: Mapping[str, str] = {"embed_tokens": "embedding", "shared_head.head": "head"}
"""Names of the model's ends, which DeepSeek-V3's weights repeat in each module of multi-token prediction."""

_NAME = re.compile(
    r"(?P<layers>(?:model\.)?layers|mtp\.blocks)\.(?P<number>\d+)\.(?P<module>.+)\.(?P<tensor>weight|bias)"
)


def to_huggingface(name: str, parts: Mapping[str, str] = PARTS, layers: int | None = None) -> str:
    """`layers.3.attention.q.weight` -> `model.layers.3.self_attn.q_proj.weight`.

    Args:
        name: a parameter of `transformer`.
        parts: the modules of a layer, where they differ from `PARTS`.
        layers: number of layers. Modules of multi-token prediction are then the layers after them, as in
            DeepSeek-V3's weights: with 61, `mtp.blocks.0.projection.weight` -> `model.layers.61.eh_proj.weight`.

    Raises:
        KeyError: those models have no such parameter.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return _of_ends(name, ENDS)
    number, tables = int(match["number"]), [parts]
    if match["layers"] == "mtp.blocks":
        if layers is None:
            raise KeyError(f"no counterpart for parameter {name!r} without the number of layers, which it comes after")
        number, tables = number + layers, [parts, PREDICTION]
    return f"model.layers.{number}.{_module(match, *tables)}"


def from_huggingface(name: str, parts: Mapping[str, str] = PARTS, layers: int | None = None) -> str:
    """`model.layers.3.self_attn.q_proj.weight` -> `layers.3.attention.q.weight`.

    Args:
        name: a parameter of a Hugging Face model.
        parts: as in `to_huggingface`.
        layers: likewise. Copies of embedding and head in modules of multi-token prediction are named like the model's
            own.

    Raises:
        KeyError: `transformer` has no such parameter.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return _of_ends(name, _inverse(ENDS))
    number = int(match["number"])
    # Modules of multi-token prediction have the numbers after the last layer
    if layers is None or number < layers:
        return f"layers.{number}.{_module(match, _inverse(parts))}"
    if match["module"] in COPIES:
        return f"{COPIES[match['module']]}.{match['tensor']}"
    return f"mtp.blocks.{number - layers}.{_module(match, _inverse(parts), _inverse(PREDICTION))}"


def _module(match: re.Match[str], *tables: Mapping[str, str]) -> str:
    """Returns the module of a layer and its tensor, by the other model's names."""
    counterpart = next((table[match["module"]] for table in tables if match["module"] in table), None)
    if counterpart is None:
        raise KeyError(f"no counterpart for parameter {match.string!r}")
    return f"{counterpart}.{match['tensor']}"


def _of_ends(name: str, table: Mapping[str, str]) -> str:
    module, _, tensor = name.rpartition(".")
    if module not in table or tensor not in ("weight", "bias"):
        raise KeyError(f"no counterpart for parameter {name!r}")
    return f"{table[module]}.{tensor}"


def _inverse(table: Mapping[str, str]) -> dict[str, str]:
    return {theirs: ours for ours, theirs in table.items()}
