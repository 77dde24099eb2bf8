"""Weights of Hugging Face's Qwen2_5_VLForConditionalGeneration and Qwen3VLForConditionalGeneration, both ways.

Their counterpart is `vision_language` with `transformer`, `qwen_vit`, `merger` and `joint`. Tensors are the same but
for the projection of patches, which is a convolution (W, channels, frames, rows, columns) there and a matrix here.
`forge-run weights` reads and writes whole models by these tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

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
