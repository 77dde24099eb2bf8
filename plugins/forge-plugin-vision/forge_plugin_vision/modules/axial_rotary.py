"""Rotary encoding of the rows and columns of patches.

Shapes: B rows, P patches of a row, E width of a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from forge_core.contracts.model import Fill
    from forge_plugin_vision.modules.images import Images


class AxialRotary(nn.Module):
    """Tables of `rotate` for patches: the first half of the pairs turns with the row, the second with the column."""

    rates: Tensor

    def __init__(self, head_dim: int, theta: float, *, in_turns: bool = False) -> None:
        """Args: `in_turns`, whether rows have every other rate of E / 2, and columns those between."""
        super().__init__()
        self.head_dim, self.theta, self.in_turns = head_dim, theta, in_turns
        self.register_buffer("rates", torch.empty(2, head_dim // 4, dtype=torch.float64), persistent=False)

    def init_parameter(self, name: str, fill: Fill) -> None:
        raise AssertionError(f"a rotary encoding has no parameter {name}")

    def init_buffers(self, device: torch.device) -> None:
        """Recomputes the rates in float64: theta^(-4 i / E) radians a row or column for pair i of E / 4.

        In turns, columns have theta^(-(4 i + 2) / E).
        """
        pairs = 4 * torch.arange(self.head_dim // 4, dtype=torch.float64, device=device)
        exponents = torch.stack([pairs, pairs + 2 if self.in_turns else pairs])
        self.rates.copy_(self.theta ** (-exponents / self.head_dim))

    def places(self, images: Images) -> tuple[Tensor, Tensor]:
        """Returns (B, P) each: the number by which the first half of the pairs turns, and the second half."""
        return images.row, images.column

    def forward(self, images: Images, dtype: torch.dtype) -> Tensor:
        """Returns cosine and sine (2, B, P, 1, E), in float32 or wider."""
        sides = zip(self.places(images), self.rates, strict=True)
        angles = torch.cat([place[..., None, None] * rates for place, rates in sides], -1)
        cos, sin = angles.cos(), angles.sin()
        # `rotate` pairs dimension i with i + E / 2, and takes the sine negative in the first half.
        tables = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)])
        return tables.to(torch.promote_types(dtype, torch.float32))


class ApartRotary(AxialRotary):
    """Columns in the first half of a head, rows in the second, each of which is rotated as a head (Gemma 4)."""

    def forward(self, images: Images, dtype: torch.dtype) -> Tensor:
        """Returns cosine and sine (2, B, P, 1, 2, E / 2), in float32 or wider, of the halves of a head."""
        sides = zip((images.column, images.row), self.rates, strict=True)
        angles = torch.stack([place[..., None, None] * rates for place, rates in sides], -2)
        cos, sin = angles.cos(), angles.sin()
        tables = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)])
        return tables.to(torch.promote_types(dtype, torch.float32))


class CountedRotary(AxialRotary):
    """Columns first, and both counted from 1, since a class token stands at 0 (Llama 4)."""

    def places(self, images: Images) -> tuple[Tensor, Tensor]:
        return images.column + 1, images.row + 1
