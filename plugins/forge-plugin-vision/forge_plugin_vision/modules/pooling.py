"""Adapters that make one position of a window of patches.

Shapes: B rows, N images of a row at most, P patches of a row, M windows of a row, K patches of a window, W width of the
encoder, D of the language model, H heads, E width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_kit.nn.modules import Linear
from forge_plugin_vision.modules.images import Images

if TYPE_CHECKING:
    from forge_plugin_vision.kinds import Grid
    from forge_plugin_vision.modules.adapters import TwoLayers


class Windows(NamedTuple):
    """Squares of patches of an image, row by row, one image after the other; a video's lie within its frames."""

    side: int
    """Rows and columns of a window."""
    video_side: int
    """The same for grids of several frames."""
    ragged: bool
    """Whether windows at an image's edges may be smaller; otherwise its rows and columns are multiples of the side."""

    def most(self, patches: int) -> int:
        """Returns M, the most windows that images of `patches` patches together can have."""
        # Ragged ones are as many as patches in a row of frames or images of a single patch.
        return patches if self.ragged else max(patches // min(self.side, self.video_side) ** 2, 1)

    def count(self, grid: Grid) -> int:
        """Returns the number of windows of an image; of many for a `Grid` of tensors."""
        # As `positions` of the adapters, whose component modules without torch must know it, too.
        is_video = (grid.frames > 1) * 1
        side = self.side + is_video * (self.video_side - self.side)
        more = side - 1 if self.ragged else 0
        return grid.frames * ((grid.rows + more) // side) * ((grid.columns + more) // side)

    def members(self, images: Images) -> tuple[Tensor, Tensor]:
        """Returns numbers of the patches of each window (B, M, K), and which of them there are (B, M, K) bool."""
        frames, rows, columns = images.grids.unbind(-1)
        side = torch.where(frames > 1, self.video_side, self.side)
        more = side - 1 if self.ragged else torch.zeros_like(side)
        merged = torch.stack([frames, (rows + more) // side, (columns + more) // side], -1)
        # Windows lie in an image as patches do, in a grid of fewer rows and columns.
        windows = Images.of(merged, self.most(images.number.shape[1]))
        own = windows.number.clamp(max=images.grids.shape[1] - 1)
        sizes = images.grids.prod(-1)
        of_image = (sizes.cumsum(1) - sizes, rows, columns, side)
        starts, rows, columns, side = (each.gather(1, own).unsqueeze(-1) for each in of_image)
        member = torch.arange(max(self.side, self.video_side) ** 2, device=own.device)
        row = windows.row.unsqueeze(-1) * side + member // side
        column = windows.column.unsqueeze(-1) * side + member % side
        # Missing: members of filler, beyond the smaller of both sides, and beyond an edge
        there = windows.valid.unsqueeze(-1) & (member < side**2) & (row < rows) & (column < columns)
        return torch.where(there, starts + (windows.frame.unsqueeze(-1) * rows + row) * columns + column, 0), there


def taken(features: Tensor, index: Tensor, there: Tensor) -> Tensor:
    """Returns (B, M, K, W): the features (B, P, W) at index (B, M, K), zeros where there are none."""
    rows = torch.arange(len(features), device=index.device).view(-1, 1, 1) * features.shape[1]
    found = features.flatten(0, 1).index_select(0, (rows + index).flatten()).unflatten(0, index.shape)
    return torch.where(there.unsqueeze(-1), found, 0)


class ShuffledProjection(nn.Module):
    """One matrix on the features of a window, joined row by row: (B, P, W) to (B, M, D).

    Before it come matrices to the widths of `hidden`, each followed by GELU.
    """

    def __init__(self, width: int, factor: int, hidden: Sequence[int], dim: int, *, bias: bool) -> None:
        super().__init__()
        self.windows = Windows(factor, factor, ragged=False)
        widths = [factor**2 * width, *hidden]
        self.hidden = nn.ModuleList(Linear(*pair, bias=bias) for pair in pairwise(widths))
        self.project = Linear(widths[-1], dim, bias=bias)

    def forward(self, features: Tensor, images: Images) -> Tensor:
        x = taken(features, *self.windows.members(images)).flatten(2)
        for matrix in self.hidden:
            x = F.gelu(matrix(x))
        projected: Tensor = self.project(x)
        return projected

    def flops(self, grid: Grid) -> float:
        """Counts 6 a weight and window."""
        return 6.0 * self.windows.count(grid) * _matrices(self)


class AveragedWindows(nn.Module):
    """The mean of each window, projected: (B, P, W) to (B, M, D)."""

    def __init__(self, windows: Windows, projection: TwoLayers) -> None:
        super().__init__()
        self.windows, self.projection = windows, projection

    def forward(self, features: Tensor, images: Images) -> Tensor:
        projected: Tensor = self.projection(means(features, *self.windows.members(images)), images)
        return projected

    def flops(self, grid: Grid) -> float:
        """Counts 6 a weight and window, and nothing for the means."""
        return 6.0 * self.windows.count(grid) * _matrices(self.projection)


class AttendedWindows(nn.Module):
    """Attention of each window's mean to the window, then down(silu(gate(x)) up(x)): (B, P, W) to (B, M, D)."""

    def __init__(
        self, windows: Windows, width: int, hidden: int, dim: int, *, heads: int, attention_bias: bool
    ) -> None:
        super().__init__()
        self.windows, self.heads = windows, heads
        self.q, self.k, self.v, self.o = (Linear(width, width, bias=attention_bias) for _ in range(4))
        self.gate, self.up, self.down = Linear(width, hidden), Linear(width, hidden), Linear(hidden, dim)

    def forward(self, features: Tensor, images: Images) -> Tensor:
        """Maps (B, P, W) to (B, M, D); places behind the last window become finite vectors."""
        index, there = self.windows.members(images)
        q = self.q(means(features, index, there)).unflatten(-1, (self.heads, -1))
        # Keys and values of patches, before windows are made of them: at ragged edges there are more members than
        # patches.
        pairs = taken(torch.cat([self.k(features), self.v(features)], -1), index, there)
        k, v = pairs.unflatten(-1, (2, self.heads, -1)).unbind(-3)
        x = self.o(pooled(q, k, v, there).flatten(-2))
        projected: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return projected

    def flops(self, grid: Grid) -> float:
        """Counts 6 a weight, and 12 for each element of a patch, which the query of its window sees."""
        of_patches = sum(part.weight.numel() for part in (self.k, self.v))
        of_windows = _matrices(self) - of_patches
        seen = 12.0 * grid.patches * self.q.out_features
        return 6.0 * (grid.patches * of_patches + self.windows.count(grid) * of_windows) + seen


def means(features: Tensor, index: Tensor, there: Tensor) -> Tensor:
    """Returns the means (B, M, W) of the features at index (B, M, K) that there are; 0 of none."""
    wide = torch.promote_types(features.dtype, torch.float32)
    # One member of all windows at a time: windows that may be ragged have K times as many as there are patches.
    members = (taken(features, *pair).squeeze(2) for pair in zip(index.split(1, 2), there.split(1, 2), strict=True))
    total = sum((member.to(wide) for member in members), torch.zeros((), dtype=wide, device=features.device))
    return (total / there.sum(2, keepdim=True).clamp(min=1)).to(features.dtype)


def pooled(q: Tensor, k: Tensor, v: Tensor, there: Tensor) -> Tensor:
    """Attention of one query (B, M, H, E) to the members of its window (B, M, K, H, E): (B, M, H, E)."""
    # Written out: a window has four or nine members, and a kernel would take B x M as its batch.
    scores = torch.einsum("bmhe,bmkhe->bmkh", q, k) * q.shape[-1] ** -0.5
    # A window without members attends to zeros, since a softmax over nothing is NaN.
    hidden = ~there & there.any(-1, keepdim=True)
    scores = scores.masked_fill(hidden.unsqueeze(-1), -torch.inf)
    weights = scores.softmax(2, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return torch.einsum("bmkh,bmkhe->bmhe", weights, v)


def _matrices(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.ndim > 1)
