"""The adapter `perceiver`, with the arithmetic of OpenFlamingo's `PerceiverResampler`.

Shapes: B rows, N images of a row at most, P patches of a row, L latents, W width of the encoder, D width of the
language model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.contracts.model import Role
from forge_kit.nn.modules import LayerNorm, Linear

if TYPE_CHECKING:
    from forge_core.contracts.model import Fill
    from forge_plugin_vision.kinds import Grid
    from forge_plugin_vision.modules.images import Images


class ResamplerBlock(nn.Module):
    """latents + attention(latents to patches and latents), then + down(gelu(up(norm(latents))))."""

    def __init__(self, width: int, *, heads: int, head_dim: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.features_norm, self.latents_norm, self.ffn_norm = (LayerNorm(width) for _ in range(3))
        self.q, self.k, self.v = (Linear(width, heads * head_dim) for _ in range(3))
        self.o = Linear(heads * head_dim, width)
        self.up, self.down = Linear(width, hidden), Linear(hidden, width)

    def forward(self, latents: Tensor, features: Tensor, mask: Tensor) -> Tensor:
        """Returns the latents (B, N L, W); `mask` (B, 1, N L, P + N L) bool marks what each of them sees."""
        own = self.latents_norm(latents)
        seen = torch.cat([self.features_norm(features), own], 1)
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part, x in ((self.q, own), (self.k, seen), (self.v, seen))
        )
        latents = latents + self.o(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))
        x: Tensor = latents + self.down(F.gelu(self.up(self.ffn_norm(latents))))
        return x


class Resampler(nn.Module):
    """Latents for each image, blocks, a norm and a matrix: (B, P, W) to (B, N L, D)."""

    def __init__(
        self, width: int, dim: int, *, latents: int, layers: int, heads: int, head_dim: int, hidden: int
    ) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.empty(latents, width))
        self.blocks: Any = nn.ModuleList(
            ResamplerBlock(width, heads=heads, head_dim=head_dim, hidden=hidden) for _ in range(layers)
        )
        self.norm = LayerNorm(width)
        self.project = Linear(width, dim)

    def init_parameter(self, name: str, fill: Fill) -> None:
        """Draw the latents from N(0, 1), as OpenFlamingo does."""
        fill.normal(1.0)

    def init_buffers(self, device: torch.device) -> None:
        """There are none."""

    def forward(self, features: Tensor, images: Images) -> Tensor:
        """Maps features (B, P, W) to (B, N L, D): L vectors for each image, which attend to no other image."""
        count, each = images.grids.shape[1], len(self.latents)
        # Images that there are come first: positions of the sequence count them alone.
        order = (images.grids.prod(-1) == 0).to(torch.int8).argsort(dim=1, stable=True)
        owners = order.repeat_interleave(each, 1)
        # Latents of an image that a row lacks see each other, so that their attention is finite.
        seen = torch.cat([images.number, owners], 1)
        mask = (owners.unsqueeze(2) == seen.unsqueeze(1)).unsqueeze(1)
        x = self.latents.to(features.dtype).repeat(count, 1).expand(len(features), -1, -1)
        for block in self.blocks:
            x = block(x, features, mask)
        projected: Tensor = self.project(self.norm(x))
        return projected

    def flops(self, grid: Grid) -> float:
        """Counts 6 a weight and position, and 12 a pair of positions that see each other and element."""
        each, keys = len(self.latents), self.blocks[0].k.weight.numel()
        matrices = sum(p.numel() for p in self.blocks.parameters() if p.ndim > 1) + self.project.weight.numel()
        attention = each * (grid.patches + each) * self.blocks[0].q.out_features
        # Each twice: keys and values of patches; scores and mixed values of pairs
        flops = 6.0 * (each * matrices + len(self.blocks) * 2 * (grid.patches * keys + attention))
        # Latents of an image that a row lacks are computed, and count for nothing
        return flops * (grid.patches > 0)

    def parameter_roles(self) -> Mapping[str, Role]:
        """Declares the latents an embedding: nothing is multiplied by them."""
        return {"latents": "embedding"}
