"""The encoder `tiled_vit`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import pi
from typing import TYPE_CHECKING, Literal

from attrs import field, frozen
from attrs.validators import ge, gt, le

from forge_core.contracts.errors import JobError, Problem
from forge_kit.optim.fields import DEPTH
from forge_plugin_vision.kinds import Grid, ImageFormat, VisionEncoderComponent

if TYPE_CHECKING:
    from torch import nn

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job

PADDED_TO = 8
"""The features of a tile are filled up to a multiple of this, in which Llama 3.2 Vision was trained."""


@frozen(kw_only=True)
class TiledViT(VisionEncoderComponent):
    """Vision transformer of images in tiles, all of which attend to each other (Llama 3.2 Vision).

    An image is one picture of `arrangements` tiles, whose grid covers them all. Each tile has a class token, which is
    a feature just like its patches; a feature is the last hidden state followed by the outputs of the `intermediate`
    blocks. As in Grattafiori et al. (2024, section 7.2); the defaults match `MllamaVisionConfig` in `transformers`.
    """

    dim: int = field(default=1280, validator=gt(0))
    """Width of the blocks; features are wider by the outputs of the `intermediate` blocks."""
    layers: int = field(default=32, validator=DEPTH)
    """Number of blocks before the second encoding of tiles."""
    global_layers: int = field(default=8, validator=[ge(0), le(10_000)])
    """Number of blocks after it, whose parts are multiplied by the tanh of learned numbers."""
    heads: int = field(default=16, validator=gt(0))
    """Attention heads, a divisor of `dim`."""
    hidden: int = field(default=0, validator=ge(0))
    """Width between the matrices of the feed-forward part; 0: 4 times `dim`."""
    patch: int = field(default=14, validator=gt(0))
    """Side of a patch in pixels."""
    tile: int = field(default=448, validator=gt(0))
    """Side of a tile in pixels, of which whole patches are seen; a multiple of `patch`."""
    arrangements: tuple[tuple[int, int], ...] = ((1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1))
    """Rows and columns of tiles that an image may have. Each pair has separate encodings, in this order."""
    intermediate: tuple[int, ...] = (3, 7, 15, 23, 30)
    """Numbers of blocks, of the first `layers` from 0, whose outputs are a part of each feature."""
    activation: Literal["gelu", "gelu_tanh", "quick_gelu"] = "gelu"
    """Between the matrices of the feed-forward part."""
    gate_start: float = pi / 4
    """Initial value of the learned numbers of `global_layers`; the learned numbers of the encodings of tiles start
    at 0."""
    mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    """Subtracted from red, green and blue, as a share of 255."""
    std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)
    """Divides them afterwards."""
    resample: Literal["bilinear", "bicubic", "lanczos"] = "bilinear"
    """How images are resized."""
    eps: float = field(default=1e-5, validator=gt(0))
    """Added to the variance in the norms of blocks; it is 1e-5 always in those before and after them."""
    init_std: float = field(default=0.02, validator=gt(0))
    """Standard deviation of initial matrices and tables."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Yields sizes that do not divide, arrangements that occur twice, and blocks that do not exist."""
        if self.dim % self.heads:
            yield Problem("heads", f"{self.heads} does not divide dim, which is {self.dim}")
        if self.tile % self.patch:
            yield Problem("tile", f"{self.tile} is not divisible by patch, which is {self.patch}")
        if not self.arrangements or min(min(tiles) for tiles in self.arrangements) < 1:
            yield Problem("arrangements", "it is a list of pairs, rows and columns of tiles, of 1 or more each")
        # The encoder looks an arrangement up by its rows and columns, which must be one entry.
        elif len({*self.arrangements}) < len(self.arrangements):
            yield Problem("arrangements", "a pair occurs twice, and an image could have either's encoding")
        if any(not 0 <= number < self.layers for number in self.intermediate):
            yield Problem("intermediate", f"{list(self.intermediate)}: there are {self.layers} layers, from 0")
        elif len({*self.intermediate}) < len(self.intermediate):
            yield Problem("intermediate", f"{list(self.intermediate)} names a block twice; name each once")
        if min(self.std) <= 0:
            yield Problem("std", f"{list(self.std)} must be above 0, since pixels are divided by it")

    @property
    def side(self) -> int:
        """Patches along a side of a tile."""
        return max(1, self.tile // self.patch)  # a tile smaller than a patch is named by `problems`

    @property
    def most_tiles(self) -> int:
        """Tiles of an image at most."""
        return max(rows * columns for rows, columns in self.arrangements)

    def image_format(self) -> ImageFormat:
        """Returns a format in which an image fills one of `arrangements` of whole tiles."""
        return ImageFormat(
            patch=self.patch,
            mean=self.mean,
            std=self.std,
            resample=self.resample,
            multiple=self.side,
            arrangements=self.arrangements,
        )

    def feature_grid(self, grid: Grid) -> Grid:
        """Returns tiles as frames of one row, which has the tile's class token and its patches."""
        # A tile is a row here: its class token, and then its patches.
        tiles = grid.patches // self.side**2
        return Grid(tiles, (tiles > 0) * 1, (tiles > 0) * (self.side**2 + 1))

    def feature_room(self, patches: int) -> int:
        """Returns one feature more than patches for each whole tile."""
        return patches // self.side**2 * (self.side**2 + 1)

    def build(self, context: BuildContext, taps: Sequence[int]) -> nn.Module:
        """Build it, with `intermediate` outputs in place of taps.

        Raises:
            JobError: the fusion uses taps.
        """
        from forge_plugin_vision.modules.tiled_vit import TiledVisionTransformer

        if taps:
            message = "a fusion that uses outputs of single blocks needs another encoder, such as vit"
            raise JobError([Problem(context.path, f"{message}; `intermediate` makes them parts of features here")])
        return TiledVisionTransformer(self)
