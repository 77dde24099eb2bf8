"""The adapter `any_resolution`."""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt
from typing import TYPE_CHECKING, Any

from attrs import field, frozen
from attrs.validators import ge, gt

from forge_core.contracts.errors import Problem
from forge_plugin_vision.adapters import Activation
from forge_plugin_vision.kinds import TILE_ROW, AdapterComponent, Grid

if TYPE_CHECKING:
    from torch import nn

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job

SHRUNK_FROM = 1.1
"""A plane is shrunk if its sides are more than this times too long, as in LLaVA-OneVision."""


@frozen(kw_only=True)
class AnyResolution(AdapterComponent):
    """Joins the features of an image's tiles, cuts them to its shape, and ends each row with a learned vector.

    The features of the whole image in one tile come first, without such a vector. Each is projected like `mlp` before
    (LLaVA-NeXT, Liu et al. 2024; LLaVA-OneVision, Li et al. 2024). An image in one tile, and a video, end with one such
    vector. The encoder has images of one size, of which tiles are.
    """

    arrangements: tuple[tuple[int, int], ...] = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
    """Rows and columns of tiles that an image may have, LLaVA-NeXT's by default; of equals the first is taken."""
    max_feature_tiles: int = field(default=0, validator=ge(0))
    """Tiles that the joined features are as many as at most: larger planes of them are shrunk bilinearly. 9 in
    LLaVA-OneVision (`anyres_max_9`). 0: none is shrunk."""
    frame_pool: int = field(default=1, validator=gt(0))
    """Sides of a video's frames in features are divided by this, bilinearly; LLaVA-OneVision has 2. 1: they are not."""
    hidden: int = field(default=0, validator=ge(0))
    """Width between the matrices; 0: the language model's width."""
    activation: Activation = "gelu"
    """Between the matrices."""
    bias: bool = True
    """Whether the matrices have biases."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Yields sides of `arrangements` that the frames of a `Grid` cannot encode, and pairs that occur twice."""
        if not self.arrangements or any(not 0 < side < TILE_ROW for tiles in self.arrangements for side in tiles):
            message = f"it is a list of pairs, rows and columns of tiles, from 1 to {TILE_ROW - 1}"
            yield Problem("arrangements", f"{message}; take mlp for images without tiles")
        elif len({*self.arrangements}) < len(self.arrangements):
            yield Problem("arrangements", "a pair occurs twice; leave one of them out")

    def positions(self, grid: Grid) -> int:
        """Returns the positions of an image, by its kind.

        In joined tiles: the overview's features, then the plane with a vector after each row. In one tile: its features
        and one vector. A video: the pooled features of its frames and one vector.
        """
        # Factors of 0 and 1 in place of conditions, which tensors of many grids do not allow
        joined, several = (grid.frames < 0) * 1, (grid.frames > 1) * 1
        frames, rows, columns = grid.plain
        there = (grid.frames != 0) * 1
        of_tile = rows * columns
        pooled = frames * self.pooled(rows) * self.pooled(columns)
        of_plain = of_tile + several * (pooled - of_tile) + there
        high, wide = self.plane(grid)
        return of_plain + joined * (of_tile + high * (wide + 1) - of_plain)

    def pooled(self, side: int) -> int:
        """Returns the features along a side of a video's frame."""
        return (side + self.frame_pool - 1) // self.frame_pool

    def plane(self, grid: Grid) -> tuple[int, int]:
        """Returns the rows and columns of joined features, for a `Grid` of int64 tensors, too; any of no tiles."""
        if not self.max_feature_tiles:
            return grid.rows, grid.columns
        # In floating point, with its roundings, since published models were trained so.
        side: Any = grid.plain.rows
        most = self.max_feature_tiles * side**2
        # 1 is added where `most` is 0, which has no image: the division must be defined there, too.
        ratio = _root(_wide(grid.rows) * grid.columns / (most + (most == 0) * 1))
        shrinks = (ratio > SHRUNK_FROM) * 1
        ratio = ratio + (1 - shrinks) * (1 - ratio)  # 1 where nothing is shrunk
        return _whole(_wide(grid.rows) // ratio), _whole(_wide(grid.columns) // ratio)

    def build(self, context: BuildContext, width: int, dim: int) -> nn.Module:
        """Build it; the module reads these keys for the sizes of planes and pooled frames."""
        from forge_plugin_vision.modules.adapters import TwoLayers
        from forge_plugin_vision.modules.any_resolution import JoinedTiles

        projection = TwoLayers(width, self.hidden or dim, dim, activation=self.activation, bias=self.bias)
        return JoinedTiles(self, projection, dim)


def _wide(number: Any) -> Any:
    """A number or a tensor in double precision; integers of Python divide so."""
    return number.double() if hasattr(number, "double") else float(number)


def _root(number: Any) -> Any:
    return number.sqrt() if hasattr(number, "sqrt") else sqrt(number)


def _whole(number: Any) -> Any:
    return number.long() if hasattr(number, "long") else int(number)
