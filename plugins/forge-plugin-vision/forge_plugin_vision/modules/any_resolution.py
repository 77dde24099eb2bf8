"""The adapter `any_resolution`.

Shapes: B rows, N images of a row at most, F features of a row before and M behind, W width of the encoder, D width of
the language model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isqrt
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from forge_plugin_vision.kinds import Grid

if TYPE_CHECKING:
    from forge_core.contracts.model import Fill, Role
    from forge_plugin_vision.any_resolution import AnyResolution
    from forge_plugin_vision.modules.adapters import TwoLayers
    from forge_plugin_vision.modules.images import Images


class JoinedTiles(nn.Module):
    """See `forge_plugin_vision.AnyResolution`: (B, F, W) to (B, M, D)."""

    def __init__(self, keys: AnyResolution, projection: TwoLayers, dim: int) -> None:
        super().__init__()
        self.keys, self.projection = keys, projection
        self.newline = nn.Parameter(torch.empty(dim))

    def init_parameter(self, name: str, fill: Fill) -> None:
        """Draw `newline` from N(0, 1 / D), as the `image_newline` of LLaVA-NeXT in `transformers`."""
        fill.normal(self.newline.numel() ** -0.5)

    def init_buffers(self, device: torch.device) -> None:
        """There are none."""

    def forward(self, features: Tensor, images: Images) -> Tensor:
        """Returns (B, M, D): projected features, interpolated at the places of positions, and vectors that end rows."""
        x = self.projection(features, images)
        places = Places.of(self.keys, images.grids, self._most(images))
        joined = self._sampled(x, places)
        return torch.where(places.is_newline.unsqueeze(-1), self.newline.to(x.dtype), joined)

    def _most(self, images: Images) -> int:
        """Returns M: as many features as there are, and the vectors that end rows."""
        features, count = images.number.shape[1], images.grids.shape[1]
        # An image of r x c tiles has (1 + r c) s^2 features, and at most r s rows. Of several images, roots add up to
        # the most where all are equal.
        most = max(rows**2 * count * features // (1 + rows * columns) for rows, columns in self.keys.arrangements)
        return features + count + isqrt(most) + 1

    def _sampled(self, x: Tensor, places: Places) -> Tensor:
        """Returns (B, M, D): between the features around each place, bilinearly."""
        if not self.keys.max_feature_tiles and self.keys.frame_pool == 1:
            return _taken(x, places.first(x.shape[1]))  # all places are whole numbers
        # Not in bfloat16, which would round each of the four terms and each sum of them
        wide = torch.promote_types(x.dtype, torch.float32)
        # One corner of all places at a time, as there are four times as many corners as features.
        corners = (weight.to(wide).unsqueeze(-1) * _taken(x, index) for index, weight in places.corners(x.shape[1]))
        return sum(corners, torch.zeros((), dtype=wide, device=x.device)).to(x.dtype)

    def flops(self, grid: Grid) -> float:
        """Counts 6 a weight and feature of the encoder: features are projected before they are joined."""
        matrices = sum(p.numel() for p in self.projection.parameters() if p.ndim > 1)
        return 6.0 * matrices * grid.patches

    def parameter_roles(self) -> Mapping[str, Role]:
        """Declares `newline` an embedding: by its one dimension it would be a norm."""
        return {"newline": "embedding"}


class Segment(NamedTuple):
    """Planes of features from which positions are made, two for each image. All are (B, 2N) int64, or (B, M).

    The first has the frames of an image or of a video, or the overview of an image in tiles. The second has the joined
    tiles; for any other image a row without columns, so that it is the vector which ends a row, and nothing else.
    """

    start: Tensor
    """The number of the plane's first feature among the row's features."""
    side: Tensor
    """Features along a side of a tile."""
    across: Tensor
    """Columns of tiles."""
    top: Tensor
    """Rows of features above those that are shown."""
    left: Tensor
    """Columns before those."""
    rows: Tensor
    """Rows that are shown."""
    columns: Tensor
    """Columns likewise."""
    high: Tensor
    """Rows of positions, which may be fewer."""
    wide: Tensor
    """Columns of positions, likewise."""
    newline: Tensor
    """1 if the learned vector ends each row, else 0."""

    @classmethod
    def of(cls, keys: AnyResolution, grids: Tensor) -> tuple[Segment, Tensor]:
        """Returns the segments of images with these grids (B, N, 3), and how many positions each takes."""
        frames, rows, columns = grids.unbind(-1)
        grid: Any = Grid(frames, rows, columns)  # type: ignore[arg-type]
        plain: Any = grid.plain
        there, (down, across) = (frames != 0).long(), grid.tiles
        side, area, sizes = plain.rows, plain.rows * plain.columns, plain.frames * plain.rows * plain.columns
        start, none, one = sizes.cumsum(1) - sizes, torch.zeros_like(side), torch.ones_like(side)
        # Of videos alone, and along both sides, as the encoder's images are squares
        pooled = torch.where(frames > 1, keys.pooled(side), side)
        first = cls(start, side, one, none, none, side, side, pooled, pooled, none)
        high, wide = (
            torch.where(frames < 0, each, other) for each, other in zip(keys.plane(grid), (1, 0), strict=True)
        )
        # The image is in the middle of its tiles: as much is cut before as behind.
        top, left = ((tiles * side - shown) // 2 for tiles, shown in ((down, rows), (across, columns)))
        second = cls(start + area, side, across, top, left, rows, columns, high, wide, one)
        # The overview is one frame. A row of the second plane has one position more, for its vector.
        counts = pooled**2 * torch.where(frames < 0, 1, frames), high * (wide + 1) * there
        both = (torch.stack(pair, -1).flatten(1) for pair in zip(first, second, strict=True))
        return cls(*both), torch.stack(counts, -1).flatten(1)


class Places(NamedTuple):
    """The places of a row's positions in its features."""

    segment: Segment
    """(B, M): the segment of each position."""
    is_newline: Tensor
    """(B, M) bool: the learned vector stands there."""
    y: Tensor
    """(B, M) float64: row among those that are shown, which may lie between two of them."""
    x: Tensor
    """Column, likewise."""

    @classmethod
    def of(cls, keys: AnyResolution, grids: Tensor, most: int) -> Places:
        """Compute the places of `most` positions, by arithmetic on the device alone."""
        segments, counts = Segment.of(keys, grids)
        ends = counts.cumsum(1)
        index = torch.arange(most, device=ends.device).expand(len(ends), -1).contiguous()
        # Behind the last image positions are counted to the last segment; nothing reads them.
        number = torch.searchsorted(ends, index, right=True).clamp(max=ends.shape[1] - 1)
        own = Segment(*(each.gather(1, number) for each in segments))
        within = index - (ends - counts).gather(1, number)
        line = (own.wide + own.newline).clamp(min=1)
        frame, rest = within // (own.high * line).clamp(min=1), within % (own.high * line).clamp(min=1)
        row, column = rest // line, rest % line
        own = own._replace(start=own.start + frame * own.side**2)  # frames are planes, one after the other
        y, x = _source(row, own.rows, own.high), _source(column, own.columns, own.wide)
        return cls(own, (own.newline > 0) & (column == own.wide), y, x)

    def first(self, features: int) -> Tensor:
        """Returns the feature (B, M) at each place, where none lies between two."""
        return self._feature(self.y.long(), self.x.long(), features)

    def corners(self, features: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields four features (B, M) around each place, and their weights."""
        low = self.y.floor().long(), self.x.floor().long()
        # At the last row and column both corners are the same, as in `F.interpolate`.
        high = (low[0] + 1).minimum(self.segment.rows - 1), (low[1] + 1).minimum(self.segment.columns - 1)
        down, right = self.y - low[0], self.x - low[1]
        for row, of_row in ((low[0], 1 - down), (high[0], down)):
            for column, of_column in ((low[1], 1 - right), (high[1], right)):
                yield self._feature(row, column, features), of_row * of_column

    def _feature(self, row: Tensor, column: Tensor, features: int) -> Tensor:
        """Returns the number, among this many features, of that in a row and a column of those that are shown."""
        own, side = self.segment, self.segment.side.clamp(min=1)
        row, column = row + own.top, column + own.left
        tile = row // side * own.across + column // side
        # Behind the last image it is anything, since no position takes it.
        return (own.start + tile * side**2 + row % side * side + column % side).clamp(0, features - 1)


def _source(place: Tensor, size: Tensor, onto: Tensor) -> Tensor:
    """Returns where a row of `onto` lies among `size`, as `F.interpolate(mode="bilinear")` has it, in float64."""
    centre = (place.double() + 0.5) * (size.double() / onto.clamp(min=1)) - 0.5
    return centre.clamp(min=0).minimum((size - 1).clamp(min=0).double())


def _taken(x: Tensor, index: Tensor) -> Tensor:
    """Returns the vectors (B, I, W) of x (B, P, W) at index (B, I)."""
    return x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
