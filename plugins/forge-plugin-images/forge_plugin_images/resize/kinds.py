"""The kind `resize`: how images of any size become images of whole patches, as many and as large as a model takes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import attrs
from attrs import frozen
from PIL import Image

from forge_core.contracts.components import Component
from forge_core.contracts.errors import JobError, Problem
from forge_plugin_vision import Grid, image_input

if TYPE_CHECKING:
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job
    from forge_plugin_vision import ImageFormat, ImageInput

Overview = Literal["first", "last", "none"]
"""Where the whole image stands among its tiles."""
Size = tuple[int, int]
"""Height and width in pixels."""
RESAMPLING = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
SAMPLES: Sequence[Size] = ((1, 1), (40, 50), (1000, 700), (30, 3000), (3000, 30))
"""Sizes of images by which a type is tried when a job is checked."""


@frozen
class Resizer:
    """Makes one image of an image, of the size that `target` returns. It can be pickled to worker processes.

    All methods are pure functions: an image is measured by `grids` before it is decoded, and a row has room for just
    that.
    """

    form: ImageFormat
    """Of the model's encoder: the size of a patch, and what grids of patches must have."""

    @property
    def overview(self) -> Overview:
        """Where the whole image stands among several tiles; `none` for a single one."""
        return "none"

    @property
    def step(self) -> int:
        """Pixels that sides are multiples of, where encoder and adapter take images of any size."""
        return self.form.patch * self.form.multiple

    @property
    def resampling(self) -> Image.Resampling:
        """How the encoder's pixels are interpolated."""
        return RESAMPLING[self.form.resample]

    def target(self, size: Size) -> Size:
        """Returns height and width in pixels that an image of this size gets.

        They are multiples of `step`; for an encoder of one size, `fixed_size` of its format.
        """
        raise NotImplementedError

    def fitted(self, image: Image.Image) -> Image.Image:
        """Returns the image at its target's size; by default stretched to it."""
        return self.stretched(image, self.target((image.height, image.width)))

    def stretched(self, image: Image.Image, target: Size) -> Image.Image:
        """Returns the image at this size, and itself if it has it, since Pillow would copy its pixels."""
        height, width = target
        return image if image.size == (width, height) else image.resize((width, height), self.resampling)

    def tiles(self, size: Size) -> tuple[int, int]:
        """Returns rows and columns of the tiles of an image of this size; (1, 1) if it is not cut."""
        return 1, 1

    def grids(self, size: Size) -> tuple[Grid, ...]:
        """Returns the grids of an image of this size: one, or one for each tile and the overview."""
        height, width = self.target(size)
        return (Grid(1, height // self.form.patch, width // self.form.patch),)

    def images(self, image: Image.Image) -> Sequence[Image.Image]:
        """Returns what the patches of `grids` are cut from, in their order. `image` is in the encoder's channels."""
        return [self.fitted(image)]

    def among(self, images: int) -> Resizer:
        """Returns what resizes each image of a document that has this many."""
        return self

    def key(self) -> list[object]:
        """Returns everything that sizes depend on, apart from `form`: the type and its fields."""
        own = (field.name for field in attrs.fields(type(self)) if field.name != "form")
        return [type(self).__qualname__, *(getattr(self, name) for name in own)]


@frozen
class TileResizer(Resizer):
    """Makes several images of one, all of the size of a tile; subclasses define `tiles` and `cut`."""

    place: Overview = "first"
    """Where the overview stands."""

    @property
    def overview(self) -> Overview:
        """Returns `place`."""
        return self.place

    def target(self, size: Size) -> Size:
        """Returns the encoder's size: tiles and the overview have it, whatever the image's size."""
        return fixed_size(self.form)

    def cut(self, image: Image.Image, grid: tuple[int, int]) -> tuple[Sequence[Image.Image], Image.Image]:
        """Returns the tiles row by row, `grid` rows and columns, and the image that the overview is made of."""
        raise NotImplementedError

    def grids(self, size: Size) -> tuple[Grid, ...]:
        """Returns the encoder's grid, for each tile and the overview: an image that is not cut has none."""
        count = math.prod(self.tiles(size))
        return super().grids(size) * (count + (count > 1 and self.place != "none"))

    def images(self, image: Image.Image) -> Sequence[Image.Image]:
        """Returns tiles and overview; an image of one tile as a whole."""
        rows, columns = self.tiles((image.height, image.width))
        if rows * columns == 1:
            return [self.fitted(image)]
        tiles, whole = self.cut(image, (rows, columns))
        if self.place == "none":
            return tiles
        overview = self.stretched(whole, fixed_size(self.form))
        return [overview, *tiles] if self.place == "first" else [*tiles, overview]


@frozen(kw_only=True)
class ResizeComponent(Component[Resizer]):
    """Defines how images get their size: `[data.sources.resize]`, and `[data.sources.video.resize]` for frames."""

    kind = "resize"
    suits_frames: ClassVar[bool] = False
    """Whether frames of clips can be resized so: each is one image, of at most the patches that `build` receives."""

    def build(self, seen: ImageInput, patches: float | None = None) -> Resizer:
        """Returns what resizes images for a model that has `seen` as its input.

        Args:
            seen: format of the encoder, and the room of a sequence.
            patches: the upper bound of an image, as of a frame, whose clip has a bound. None: there is no other than a
                key of this type, or by default an image's share of a sequence (`share_of`).
        """
        raise NotImplementedError

    def smallest(self, form: ImageFormat) -> int:
        """Returns the patches of the smallest image that it makes, of which a clip's frames have at least as many."""
        return form.grid[0] * form.grid[1] if form.grid else form.multiple**2

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that images suit encoder and adapter; a model without images is the dataset's problem."""
        try:
            seen = image_input(job)
        except JobError:
            return
        yield from self.size_problems(seen)

    def size_problems(self, seen: ImageInput) -> Iterable[Problem]:
        """Yields why images of these sizes do not suit `seen`; paths as for `problems`.

        By default images of some sizes are measured, and their grids compared with what encoder and adapter take. Room
        is compared when documents are measured.
        """
        resizer, form = self.build(seen), seen.format
        for size in SAMPLES:
            if message := next(filter(None, (_grid_problem(grid, form) for grid in resizer.grids(size))), ""):
                yield Problem("", f"an image of {size[0]} x {size[1]} pixels becomes {message}")
                return

    def share_problems(self, seen: ImageInput) -> Iterable[Problem]:
        """Yields why an image has no room in its share of a sequence; not asked of frames, which share their clip's."""
        return ()


def _grid_problem(grid: Grid, form: ImageFormat) -> str:
    """Returns why an encoder does not take a grid; empty if it does."""
    _, rows, columns = grid.plain
    if form.grid:
        wanted = f"{form.grid[0]} x {form.grid[1]}"
        return "" if (rows, columns) == form.grid else f"{rows} x {columns} patches, and the encoder takes {wanted}"
    if rows < 1 or columns < 1 or rows % form.multiple or columns % form.multiple:
        return f"{rows} x {columns} patches, and both sides must be multiples of {form.multiple}"
    return ""


def share_of(seen: ImageInput) -> int:
    """Returns the patches of an image where no key bounds them: its share of a sequence."""
    return seen.patches_per_sequence // seen.images_per_sequence


def fixed_size(form: ImageFormat) -> Size:
    """Returns height and width in pixels of all images of an encoder with one size."""
    assert form.grid is not None
    # `pixels` first: an encoder may leave out the last pixels, as its patches do not divide the image
    return form.pixels or (form.grid[0] * form.patch, form.grid[1] * form.patch)


def smallest_problems(seen: ImageInput) -> Iterator[Problem]:
    """Yields that the smallest image of an encoder of any size has more patches than its share of a sequence."""
    if (most := share_of(seen)) < (least := seen.format.multiple**2) and not seen.format.grid:
        message = f"{most} patches of an image at most, and the smallest has {least} with this adapter"
        yield Problem("", f"{message}; raise model.vision.patches_per_sequence")


def any_size_problems(title: str, form: ImageFormat) -> Iterator[Problem]:
    """Yields why an encoder does not take images of any size; `title` is the type that makes them."""
    if form.grid:
        size = f"{form.grid[0] * form.patch} x {form.grid[1] * form.patch} pixels"
        yield Problem("", f"{title!r}, but the encoder takes images of {size}; take 'stretch', 'crop' or 'pad'")
    elif form.arrangements:
        yield Problem("", f"{title!r}, but the encoder takes images in tiles; take 'canvas'")


def one_size_problems(title: str, form: ImageFormat) -> Iterator[Problem]:
    """Yields why an encoder does not take images of one size; `title` is the type that makes them."""
    if form.arrangements and not form.grid:
        yield Problem("", f"{title!r}, but the encoder takes images in tiles; take 'canvas'")
    elif not form.grid:
        yield Problem("", f"{title!r}, but the encoder takes images of any size; take 'native' or 'fill'")
