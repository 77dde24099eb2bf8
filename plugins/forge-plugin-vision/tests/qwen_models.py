"""A small model with every part of Qwen's: windows, a table of positions, `merger`, `mrope` and DeepStack."""

from __future__ import annotations

from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_plugin_vision import Joint, Merger, MultimodalRope, QwenViT, VisionLanguage, VisionPart

LANGUAGE = Transformer(
    vocab_size=32,
    dim=16,
    layers=3,
    attention=GroupedQueryAttention(
        heads=4,
        kv_heads=2,
        head_dim=8,
        rope=MultimodalRope(sections=(2, 1, 1), interleaved=True, time="seconds", positions_per_second=6.0),
    ),
)
TOWER = QwenViT(dim=16, layers=3, heads=2, hidden=24, patch=2, window=8, full_attention=(1,), table=3, patch_bias=True)
"""Its images have 2 to 6 patches a side, its windows 4."""
MODEL = VisionLanguage(
    language=LANGUAGE,
    vision=VisionPart(encoder=TOWER, adapter=Merger(norm="layernorm"), images_per_sequence=2, patches_per_sequence=32),
    fusion=Joint(deepstack=(0, 2), deepstack_adapter=Merger(norm="layernorm", norm_over="block")),
)
