"""Small models with fusion `mot` in float64, and jobs in which some rows have images."""

from __future__ import annotations

from typing import Any

from forge_plugin_transformer import GroupedQueryAttention, SwiGLU, Transformer
from forge_plugin_vision import FusionComponent, VisionLanguage
from forge_testing.vision import RandomImages, tiny_vision

LENGTH = 24
ATTENTION = GroupedQueryAttention(heads=4, kv_heads=2, qk_norm=True)
LANGUAGE = Transformer(vocab_size=32, dim=16, layers=2, attention=ATTENTION, ffn=SwiGLU(hidden=24), init_std=0.3)


def vision_language(fusion: FusionComponent, language: Any = LANGUAGE) -> VisionLanguage:
    return VisionLanguage(language=language, vision=tiny_vision(), fusion=fusion)


def rows(fusion: FusionComponent, language: Any = LANGUAGE) -> dict[str, Any]:
    """The settings of a job of three steps, in which every third row has no image."""
    sizes = {"precision": "fp64", "steps": 3, "global_batch_size": 4, "seq_len": LENGTH}
    return {"model": vision_language(fusion, language), "data": {"sources": (RandomImages(held_out=3),)}, **sizes}
