"""Adapters of one position a patch.

Shapes: B rows, P patches of a row, W width of the encoder, D width of the language model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from forge_kit.nn.modules import Linear
from forge_plugin_vision.modules.activations import ACTIVATIONS

if TYPE_CHECKING:
    from forge_plugin_vision.modules.images import Images


class Projection(nn.Module):
    """One matrix: (B, P, W) to (B, P, D)."""

    def __init__(self, width: int, dim: int, *, bias: bool) -> None:
        super().__init__()
        self.project = Linear(width, dim, bias=bias)

    def forward(self, features: Tensor, images: Images) -> Tensor:
        projected: Tensor = self.project(features)
        return projected


class TwoLayers(nn.Module):
    """down(activation(up(x))): (B, P, W) to (B, P, D)."""

    def __init__(self, width: int, hidden: int, dim: int, *, activation: str, bias: bool) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.up = Linear(width, hidden, bias=bias)
        self.down = Linear(hidden, dim, bias=bias)

    def forward(self, features: Tensor, images: Images) -> Tensor:
        projected: Tensor = self.down(self.activation(self.up(features)))
        return projected
