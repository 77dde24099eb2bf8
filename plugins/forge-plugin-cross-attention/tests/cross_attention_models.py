"""Small models with cross-attention, whose gates are open, and rows with images for them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from forge_plugin_cross_attention import CrossAttention
from forge_plugin_transformer import GroupedQueryAttention, SwiGLU, Transformer
from forge_plugin_vision import LinearAdapter, VisionLanguage, VisionPart, ViT

PATCHES_OF_IMAGE = 6
Open = partial(CrossAttention, gate_start=0.5)
"""Gates that start at zero would hide what is behind them."""
SMALL: dict[str, Any] = {"heads": 4, "kv_heads": 2, "ffn": SwiGLU(hidden=24)}
LANGUAGE = Transformer(
    vocab_size=32, dim=16, layers=4, ffn=SwiGLU(hidden=24),
    attention=GroupedQueryAttention(heads=4, kv_heads=2, qk_norm=True),
)  # fmt: skip
VISION = VisionPart(
    encoder=ViT(dim=16, layers=1, heads=2, patch=2, size=(4, 6)), adapter=LinearAdapter(), images_per_sequence=3
)


def model_of(fusion: CrossAttention | None = None, **changes: Any) -> VisionLanguage:
    settings: dict[str, Any] = {"language": LANGUAGE, "vision": VISION}
    return VisionLanguage(fusion=fusion or Open(every=2, qk_norm=True, **SMALL), **{**settings, **changes})


def uneven(model: nn.Module) -> Any:
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if "gate.weight" not in name or parameter.ndim > 1:
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.data.add_(noise, alpha=0.2)
    return model


def rows(*ids: str, seed: int = 0) -> dict[str, Tensor]:
    """Returns a batch of rows such as "iabic": i is an image, of 3 at most, every other letter a token of its own."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [[-1 if letter == "i" else ord(letter) % 32 for letter in row] for row in ids]
    grids = torch.zeros(len(ids), 3, 3, dtype=torch.long)
    for number, row in enumerate(ids):
        grids[number, : row.count("i")] = torch.tensor([1, 2, 3])
    patches = torch.randint(256, (len(ids), 3 * PATCHES_OF_IMAGE, 12), generator=generator, dtype=torch.uint8)
    filled = torch.arange(3 * PATCHES_OF_IMAGE) < grids.prod(-1).sum(1, keepdim=True)
    return {"input_ids": torch.tensor(tokens), "grids": grids, "patches": patches * filled.unsqueeze(-1)}
