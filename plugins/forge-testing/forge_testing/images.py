"""A tiny vision-language model and its job, to try a dataset of images with; needs `forge-plugin-transformer`."""

from __future__ import annotations

from typing import Any

from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_plugin_vision import MLPAdapter, VisionLanguage, VisionPart, ViT

VISION_LANGUAGE_MODEL = """
[model]
type = "vision_language"
[model.language]
dim = 16
layers = 1
attention = { heads = 2 }
[model.vision]
images_per_sequence = 2
[model.vision.encoder]
type = "vit"
dim = 16
layers = 1
heads = 2
patch = 8
size = [16, 16]
"""
"""The model of a job file."""
VISION_LANGUAGE_JOB = f"""
[train]
steps = 2
global_batch_size = 2
seq_len = 30
[data.tokenizer]
type = "bytes"
[optimizer]
type = "adamw"
{VISION_LANGUAGE_MODEL}"""
"""A job file that needs `[[data.sources]]` alone."""
LANGUAGE = Transformer(vocab_size=257, dim=16, layers=1, attention=GroupedQueryAttention(heads=4, kv_heads=2))


def tiny_model(height: int = 8, width: int = 48, any_size: bool = False, **vision: Any) -> VisionLanguage:
    """Returns a model of patches of 8 pixels, with further keys of `[model.vision]`.

    Args:
        height: of images, in pixels, as `width`.
        width: see `height`.
        any_size: whether images may have any other size, too.
        vision: `images_per_sequence` or `patches_per_sequence`.
    """
    encoder = ViT(
        dim=16,
        layers=1,
        heads=2,
        patch=8,
        size=(height, width),
        position_interpolation="bilinear" if any_size else "none",
    )
    return VisionLanguage(language=LANGUAGE, vision=VisionPart(encoder=encoder, adapter=MLPAdapter(hidden=8), **vision))
