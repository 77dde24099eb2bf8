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
    """down(gelu(up(the patches of a block, one after the other))): (B, P, W) to (B, M, D), with a norm before.

    With `joined`, up(join(the features of a block, each in all its patches)), where join makes W of them.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        dim: int,
        *,
        side: int,
        norm: nn.Module,
        norm_over: str,
        joined: bool,
        bias: bool,
        std: float,
    ) -> None:
        super().__init__()
        self.windows, self.norm_over = Windows(side, side, ragged=False), norm_over
        self.norm = norm
        block = width * side**2
        self.join = Linear(block, width, bias=False, std=std) if joined else None
        self.up = Linear(width if joined else block, hidden, bias=bias, std=std)
        self.down = Linear(hidden, dim, bias=bias, std=std)

    def forward(self, features: Tensor, images: Images) -> Tensor:
        """Maps (B, P, W) to (B, M, D), M = P // side²."""
        # The norm comes before or after patches are joined; the two have different widths.
        per_block = self.norm_over == "block"
        blocks = taken(features if per_block else self.norm(features), *self.windows.members(images))  # (B, M, K, W)
        blocks = self.norm(blocks.flatten(2)).view_as(blocks) if per_block else blocks
        # In the order of the convolution that published models have for it, so that their matrix is this one
        block = blocks.flatten(2) if self.join is None else self.join(blocks.transpose(2, 3).flatten(2))
        merged: Tensor = self.down(F.gelu(self.up(block)))
        return merged

    def flops(self, grid: Grid) -> float:
        """Counts 6 a weight and block."""
        matrices = [part.weight.numel() for part in (self.join, self.up, self.down) if part is not None]
        return 6.0 * self.windows.count(grid) * sum(matrices)
