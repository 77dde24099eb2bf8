"""The adapter `merger`.

Shapes: B rows, P patches of a row, M features of a row, W width of the encoder, D width of the language model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn import functional as F

from forge_kit.nn.modules import Linear
from forge_plugin_vision.modules.pooling import Windows, taken

if TYPE_CHECKING:
    from forge_plugin_vision.kinds import Grid
    from forge_plugin_vision.modules.images import Images


class Merger(nn.Module):
    """down(gelu(up(the patches of a block, one after the other))): (B, P, W) to (B, M, D), with a norm before."""

    def __init__(
        self, width: int, hidden: int, dim: int, *, side: int, norm: nn.Module, norm_over: str, std: float
    ) -> None:
        super().__init__()
        self.windows, self.norm_over = Windows(side, side, ragged=False), norm_over
        self.norm = norm
        self.up = Linear(width * side**2, hidden, bias=True, std=std)
        self.down = Linear(hidden, dim, bias=True, std=std)

    def forward(self, features: Tensor, images: Images) -> Tensor:
        """Maps (B, P, W) to (B, M, D), M = P // side²."""
        # The norm comes before or after patches are joined; the two have different widths.
        per_block = self.norm_over == "block"
        blocks = taken(features if per_block else self.norm(features), *self.windows.members(images)).flatten(2)
        merged: Tensor = self.down(F.gelu(self.up(self.norm(blocks) if per_block else blocks)))
        return merged

    def flops(self, grid: Grid) -> float:
        """Counts 6 a weight and block."""
        return 6.0 * self.windows.count(grid) * (self.up.weight.numel() + self.down.weight.numel())
