"""Kinds of component that a vision-language model consists of, and the module that each must build.

Shapes: B sequences, S positions, N images of a row at most, P patches of a row, V values of a patch, W width of the
encoder, M features of a row, D width of the language model.

An image is cut into patches, which an encoder turns into features; an adapter turns those into vectors of the language
model's width; a fusion defines how the language model sees them. In addition to its tokens, a batch has:

- `input_ids` (B, S): negative where the position is no token: `IMAGE` (-1), `VIDEO` (-2), `SOUND` (-3), a
  spectrogram that is an image to the encoder. An image takes as many such
  positions as the fusion specifies (`ImageInput.positions`): one for each of its features, or a single one that marks
  where it stands;
- `patches` (B, P, V) uint8: patches of the row's images, one image after the other, each row by row; zeros at the end.
  The values of a patch are in the order channel, frame, row, column;
- `grids` (B, N, 3) int64: frames, rows and columns of each image, in patches; zeros where there is no image. An image
  that the encoder sees as several tiles is one image, whose grid covers them all, so its sides say how they lie. One
  whose tiles an adapter joins has negative frames, see `Grid`. A clip of a video is one grid too, with as many frames
  as its time axis has entries, also where texts stand between them;
- `grid_seconds` (B, N) float32: seconds from one entry of a clip's time axis to the next; 0 for images;
- `broken_documents` (B,) int64: documents that the row would have, and that its dataset left out since an image or
  video of them cannot be read. It is only counted, for the metric `data/unreadable`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from attrs import evolve, field, frozen
from attrs.validators import ge, gt

from forge_core.contracts.components import Component
from forge_core.contracts.errors import JobError, Problem

if TYPE_CHECKING:
    from attrs import Attribute
    from torch import nn

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.model import Model
    from forge_core.job import Job
    from forge_plugin_vision.modules.vision import Vision

IMAGE, VIDEO, SOUND = -1, -2, -3
"""Entries of `input_ids` at positions that are no token."""
TILE_ROW = 1000
"""What a row of tiles counts in the frames of a `Grid`, where a column counts 1."""
PATCHES, GRIDS, SECONDS, BROKEN = "patches", "grids", "grid_seconds", "broken_documents"


class Grid(NamedTuple):
    """Size of an image in patches. All of its arithmetic holds for a `Grid` of tensors, too.

    An image whose tiles an adapter joins (`AdapterComponent.arrangements`) has the rows and columns of that part of
    its tiles which shows it, and `-(1000 rows + columns)` of tiles as its frames: `Grid(-1002, 24, 40)` is in one row
    of two tiles, of which 24 x 40 patches show it. Tiles are squares, and the part has all rows of them, or all
    columns. Its patches are the patches of the whole image in one tile, followed by the patches of each tile.
    """

    frames: int
    rows: int
    columns: int

    @classmethod
    def of_tiles(cls, rows: int, columns: int, shown: tuple[int, int]) -> Grid:
        """Returns the grid of an image in tiles that are joined.

        Args:
            rows: of tiles.
            columns: of tiles.
            shown: rows and columns of patches that show the image.
        """
        return cls(-(TILE_ROW * rows + columns), *shown)

    @property
    def tiles(self) -> tuple[int, int]:
        """Rows and columns of tiles that are joined; zeros for any other image."""
        code = -self.frames * (self.frames < 0)  # 0 for other images
        return code // TILE_ROW, code % TILE_ROW

    @property
    def plain(self) -> Grid:
        """The grid of what the encoder sees: tiles that are joined as frames, any other image as it is."""
        # Factors of 0 and 1 in place of conditions, which tensors of many grids do not allow
        joined, (down, across) = (self.frames < 0) * 1, self.tiles
        # One of the two is the side of the tiles, and the other is no larger; both divide by 1 for other images.
        by_rows, by_columns = self.rows // (down + 1 - joined), self.columns // (across + 1 - joined)
        side = by_rows + (by_columns - by_rows) * (by_columns > by_rows)
        return Grid(
            self.frames + joined * (1 + down * across - self.frames),
            self.rows + joined * (side - self.rows),
            self.columns + joined * (side - self.columns),
        )

    @property
    def patches(self) -> int:
        """Their number."""
        frames, rows, columns = self.plain
        return frames * rows * columns


def _one_for_each_channel(form: ImageFormat, attribute: Attribute[tuple[float, ...]], value: tuple[float, ...]) -> None:
    if len(value) != form.channels:
        raise ValueError(f"{attribute.name!r} has {len(value)} values, and the image {form.channels} channels")


@frozen(kw_only=True)
class ImageFormat:
    """How an image becomes patches; the encoder states it, so that no processor can disagree with it."""

    patch: int = field(validator=gt(0))
    """Side of a patch in pixels."""
    frames: int = field(default=1, validator=gt(0))
    """Frames of a patch; a still image is repeated that often."""
    channels: int = field(default=3, validator=gt(0))
    """3: red, green and blue; 1: grey. No data of Forge's have others."""
    mean: tuple[float, ...] = field(validator=_one_for_each_channel)
    """Subtracted from each channel, as a share of 255; by default 0.5."""
    std: tuple[float, ...] = field(validator=_one_for_each_channel)
    """Divides each channel afterwards; by default 0.5."""
    resample: str = "bicubic"
    """How pixels are interpolated when an image is resized: `bilinear`, `bicubic` or `lanczos`."""
    grid: tuple[int, int] | None = None
    """Rows and columns of patches that every image has; None: any."""
    pixels: tuple[int, int] | None = None
    """Height and width that an image is resized to, of which the patches of `grid` are the first; None: just those."""
    multiple: int = field(default=1, validator=ge(1))
    """Rows and columns of patches are multiples of this."""
    arrangements: tuple[tuple[int, int], ...] = ()
    """Rows and columns of tiles that an image may have; empty: it has none. Tiles are squares of `multiple` patches a
    side that the encoder sees together; or images of size `grid`, whose features the adapter joins."""
    clips: bool = True
    """Whether a clip of a video may be a grid of several frames; otherwise jobs with videos are refused."""

    @mean.default
    def _mean(self) -> tuple[float, ...]:
        return (0.5,) * self.channels

    @std.default
    def _std(self) -> tuple[float, ...]:
        return (0.5,) * self.channels

    @property
    def values(self) -> int:
        """V, the numbers of a patch."""
        return self.channels * self.frames * self.patch**2

    @property
    def largest(self) -> Grid | None:
        """The grid with the most patches that an image may have; None: there is no such bound."""
        if not self.arrangements:
            return Grid(1, *self.grid) if self.grid else None
        # All tiles have equally many patches.
        rows, columns = max(self.arrangements, key=lambda tiles: tiles[0] * tiles[1])
        if self.grid:
            return Grid.of_tiles(rows, columns, (rows * self.grid[0], columns * self.grid[1]))
        return Grid(1, rows * self.multiple, columns * self.multiple)

    @property
    def joins_tiles(self) -> bool:
        """Whether the tiles of an image are joined behind the encoder, which sees each alone."""
        return bool(self.grid and self.arrangements)


@frozen(kw_only=True)
class VisionEncoderComponent(Component["nn.Module"]):
    """Builds the network that turns patches into features: a vision tower.

    The module maps `(patches (B, P, V), images)` to a tuple of (B, F, W): its features, then the hidden states after
    each block of `taps`. F is `feature_room(P)`, which is P unless an encoder has other features than one a patch.
    `patches` are normalised and in the compute dtype; `images` is a
    `forge_plugin_vision.modules.images.Images`. An image's features depend on its own patches only. The module has
    `width`, and may have `flops(grid)` (of an image of that `Grid`, forward and backward; arithmetic that holds for a
    `Grid` of float64 tensors, and 0 for one of zeros), `blocks` (an `nn.ModuleList`, whose entries are recomputed,
    compiled and sharded one by one) and `parameter_roles` with names relative to itself.
    """

    kind = "vision_encoder"

    def image_format(self) -> ImageFormat:
        """Returns how an image becomes patches."""
        raise NotImplementedError

    def feature_grid(self, grid: Grid) -> Grid:
        """Returns the grid of an image's features, which the adapter sees; arithmetic that holds for tensors, too.

        Args:
            grid: of its patches, whose features it has by default.
        """
        return grid

    def feature_room(self, patches: int) -> int:
        """Returns F, the largest number of features of a row with at most this many patches."""
        return patches

    def build(self, context: BuildContext, taps: Sequence[int]) -> nn.Module:
        """Build it; `taps` are numbers of blocks, ascending, whose outputs the fusion uses as well."""
        raise NotImplementedError


@frozen(kw_only=True)
class AdapterComponent(Component["nn.Module"]):
    """Builds the module between the encoder and the language model.

    It maps `(features (B, F, W), images)` to (B, M, D): first the features of the row's first image, as many as
    `positions(grid)`, then the features of the next; the rest is arbitrary but finite. M follows from F and N alone.
    `images` has the places of the encoder's features, and `grid` is the encoder's `feature_grid` of an image. It may
    have `flops(grid)` and `parameter_roles` as the encoder.
    """

    kind = "adapter"

    @property
    def multiple(self) -> int:
        """Rows and columns of an image's patches must be multiples of this."""
        return 1

    @property
    def arrangements(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of tiles, images of the encoder's size, whose features it joins; empty: it joins none."""
        return ()

    def positions(self, grid: Grid) -> int:
        """Returns the number of features of an image; arithmetic that holds for a `Grid` of int64 tensors, too."""
        raise NotImplementedError

    def build(self, context: BuildContext, width: int, dim: int) -> nn.Module:
        """Build it for the encoder's width W and the language model's width D."""
        raise NotImplementedError


@frozen(kw_only=True)
class FusionComponent(Component["Model"]):
    """Defines how a language model sees images.

    `build` returns the language model itself, with vision added in place
    (`forge_plugin_vision.modules.grafting.graft`): names and initial values of its parameters stay.
    """

    kind = "fusion"

    @property
    def taps(self) -> Sequence[int]:
        """Numbers of encoder blocks, ascending, whose outputs it uses in addition to the encoder's features."""
        return ()

    def positions(self, grid: Grid, adapter: AdapterComponent) -> int:
        """Returns the positions of the sequence that an image takes: by default one for each of its features.

        Args:
            grid: of the encoder's features.
            adapter: of the model.
        """
        return adapter.positions(grid)

    def tile_problem(self) -> str:
        """Returns why an image must not be cut into tiles, which stand side by side; empty if it may be.

        Each tile is a separate image. A fusion whose positions attend to one image at a time would see one tile of
        several.
        """
        return ""

    def build(self, context: BuildContext, model: Model, vision: Vision) -> Model:
        """Build it around the language model `model`; `vision` maps a batch to features (B, M, D)."""
        raise NotImplementedError


@frozen(kw_only=True)
class ImageInput:
    """What a dataset must know of the model to make samples with images."""

    format: ImageFormat
    patches_per_sequence: int
    """P: a sample with more patches is refused."""
    images_per_sequence: int
    """N, likewise."""
    encoder: VisionEncoderComponent
    adapter: AdapterComponent
    fusion: FusionComponent

    def features(self, grid: Grid) -> int:
        """Returns the features of an image behind the adapter; of many for a `Grid` of int64 tensors."""
        return self.adapter.positions(self.encoder.feature_grid(grid))

    def positions(self, grid: Grid) -> int:
        """Returns the positions of the sequence that an image takes."""
        return self.fusion.positions(self.encoder.feature_grid(grid), self.adapter)


@runtime_checkable
class HasImageInput(Protocol):
    """A model component whose model sees images."""

    def image_input(self) -> ImageInput:
        """Returns the format and the room of a sequence, by which datasets make samples."""
        ...


def image_input(job: Job) -> ImageInput:
    """Returns what a dataset must know of the job's model.

    Raises:
        JobError: the model sees no images.
    """
    if not isinstance(job.model, HasImageInput):
        message = f'{type(job.model).__name__} sees no images; take type = "vision_language", with [model.language]'
        raise JobError([Problem("model", message)])
    return job.model.image_input()


def format_for(encoder: VisionEncoderComponent, adapter: AdapterComponent) -> ImageFormat:
    """Returns the encoder's format, whose grids suit the adapter too."""
    from math import lcm

    own = encoder.image_format()
    tiles = adapter.arrangements or own.arrangements
    # Sides must divide by both: whole tiles of the encoder, and whole windows of the adapter.
    return evolve(own, multiple=lcm(own.multiple, adapter.multiple), arrangements=tiles)


def grid_problems(form: ImageFormat, encoder: VisionEncoderComponent, adapter: AdapterComponent) -> Iterable[Problem]:
    """Yields why every image's grid, if it is fixed, does not suit the adapter; paths are relative to `vision`."""
    # Tested on the smallest image: an encoder whose features are its patches returns the grid unchanged.
    seen = encoder.feature_grid(smallest := Grid(1, form.multiple, form.multiple))
    if seen != smallest and (seen.rows % adapter.multiple or seen.columns % adapter.multiple):
        message = f"it joins {adapter.multiple} x {adapter.multiple} features of a grid, which this encoder's are not"
        yield Problem("adapter", f"{message}; take one that does not join any, such as linear or mlp")
    if adapter.arrangements and (not form.grid or form.grid[0] != form.grid[1]):
        given = f"has images of {form.grid[0]} x {form.grid[1]} patches" if form.grid else "has images of any size"
        message = f"it joins tiles, which are squares of the encoder's one size, and this encoder {given}"
        yield Problem("adapter", f"{message}; take another encoder, such as vit with a square size, or another adapter")
    if form.grid and any(side % form.multiple for side in form.grid):
        rows, columns = form.grid
        message = f"images have {rows} x {columns} patches, which {form.multiple} does not divide"
        yield Problem("adapter", f"{message}; take another adapter, or another size of the encoder's images")
