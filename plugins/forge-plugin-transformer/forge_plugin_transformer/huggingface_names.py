"""Parameter names of `transformer` and of Hugging Face's LlamaForCausalLM and Qwen3ForCausalLM, both ways.

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
"""Modules of a layer."""

_NAME = re.compile(r"(?P<layer>(?:model\.)?layers\.(?P<number>\d+)\.)?(?P<module>.+)\.(?P<tensor>weight|bias)")


def to_huggingface(name: str, parts: Mapping[str, str] = PARTS) -> str:
    """`layers.3.attention.q.weight` -> `model.layers.3.self_attn.q_proj.weight`.

    Args:
        parts: the modules of a layer; others than `PARTS` where a layer is made of other parts.

    Raises:
        KeyError: those models have no such parameter.
    """
    return _translate(name, ENDS, parts, prefix="model.layers")


def from_huggingface(name: str, parts: Mapping[str, str] = PARTS) -> str:
    """`model.layers.3.self_attn.q_proj.weight` -> `layers.3.attention.q.weight`.

    Args:
        parts: as for `to_huggingface`.

    Raises:
        KeyError: `transformer` has no such parameter.
    """
    return _translate(name, _inverse(ENDS), _inverse(parts), prefix="layers")


def _translate(name: str, ends: Mapping[str, str], parts: Mapping[str, str], prefix: str) -> str:
    match = _NAME.fullmatch(name)
    table = parts if match and match["layer"] else ends
    if match is None or match["module"] not in table:
        raise KeyError(f"no counterpart for parameter {name!r}")
    module = table[match["module"]]
    layer = f"{prefix}.{match['number']}." if match["layer"] else ""
    return f"{layer}{module}.{match['tensor']}"


def _inverse(table: Mapping[str, str]) -> dict[str, str]:
    return {theirs: ours for ours, theirs in table.items()}
