"""Parameter names of a `transformer` with `mla` and of Hugging Face's DeepseekV3ForCausalLM, both ways.

The tensors themselves are the same, given `rope_interleave` as in the other model's configuration. Layers are dense.
"""

from __future__ import annotations

from collections.abc import Mapping

from forge_plugin_transformer import huggingface_names

PARTS: Mapping[str, str] = {
    # Norms and feed-forward part are named as in Llama; `attention_norm` has no dot, and stays
    **{ours: theirs for ours, theirs in huggingface_names.PARTS.items() if not ours.startswith("attention.")},
    "attention.q": "self_attn.q_proj",
    "attention.q_down": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.q_up": "self_attn.q_b_proj",
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.kv_up": "self_attn.kv_b_proj",
    "attention.o": "self_attn.o_proj",
}
"""Modules of a layer."""


def to_huggingface(name: str, layers: int | None = None) -> str:
    """`layers.3.attention.kv_up.weight` -> `model.layers.3.self_attn.kv_b_proj.weight`.

    Args:
        name: of a parameter.
        layers: as for `forge_plugin_transformer.huggingface_names.to_huggingface`.

    Raises:
        KeyError: that model has no such parameter.
    """
    return huggingface_names.to_huggingface(name, PARTS, layers)


def from_huggingface(name: str, layers: int | None = None) -> str:
    """`model.layers.3.self_attn.kv_b_proj.weight` -> `layers.3.attention.kv_up.weight`.

    Args:
        name: of a parameter.
        layers: as for `forge_plugin_transformer.huggingface_names.from_huggingface`.

    Raises:
        KeyError: a dense `transformer` with `mla` has no such parameter.
    """
    return huggingface_names.from_huggingface(name, PARTS, layers)
