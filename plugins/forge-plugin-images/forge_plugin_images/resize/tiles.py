"""The types `tiles`, `aspect`, `canvas_tiles` and `split`: several images of the encoder's size show one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from attrs import field, frozen
from attrs.validators import and_, ge, le
from PIL import Image

from forge_core.contracts.errors import Problem
from forge_plugin_images.resize.kinds import (
    Overview,
    ResizeComponent,
    Resizer,
    Size,
    TileResizer,
    fixed_size,
    one_size_problems,
)
from forge_plugin_images.splitting import (
    LARGEST,
    most_tiles,
    nearest_shape,
    resized_to_longest,
    split_grid,
    split_image,
    stretched_tiles,
)
from forge_plugin_images.tiling import canvas_of, fitted_size, tile_grid, tile_grids, tiles_of

if TYPE_CHECKING:
    from forge_plugin_vision import ImageInput

LONGEST = 4
"""Tiles along the longer side where no key sets it, as in Idefics3's processor."""


@frozen
class TilesResizer(TileResizer):
    """Puts an image into the middle of the grid that keeps most of its resolution."""

    max_tiles: int = field(kw_only=True)

    def tiles(self, size: Size) -> tuple[int, int]:
        """Returns LLaVA-NeXT's choice."""
        return tile_grid(size, fixed_size(self.form), self.max_tiles)

    def cut(self, image: Image.Image, grid: tuple[int, int]) -> tuple[Sequence[Image.Image], Image.Image]:
        """Returns tiles with black bars, and the image itself."""
        return list(tiles_of(image, *grid, fixed_size(self.form), self.resampling)), image


@frozen
class AspectResizer(TilesResizer):
    """Stretches an image to the grid of nearest shape."""

    def tiles(self, size: Size) -> tuple[int, int]:
        """Returns InternVL's choice."""
        return nearest_shape(size, fixed_size(self.form), self.max_tiles)

    def cut(self, image: Image.Image, grid: tuple[int, int]) -> tuple[Sequence[Image.Image], Image.Image]:
        """Returns tiles without bars, and the image itself."""
        return stretched_tiles(image, grid, fixed_size(self.form), self.resampling), image


@frozen
class CanvasTilesResizer(TilesResizer):
    """Puts an image at the top left of black, as large as the tiles that suit it best, enlarged to one at most."""

    def tiles(self, size: Size) -> tuple[int, int]:
        """Returns Llama 4's choice, which is that of Llama 3.2 Vision."""
        return canvas_of(size, fixed_size(self.form)[0], tile_grids(self.max_tiles))

    def cut(self, image: Image.Image, grid: tuple[int, int]) -> tuple[Sequence[Image.Image], Image.Image]:
        """Returns the tiles of the canvas, and the image itself."""
        side, _ = fixed_size(self.form)
        canvas = self._on_canvas(image, (grid[0] * side, grid[1] * side))
        corners = ((side * row, side * column) for row in range(grid[0]) for column in range(grid[1]))
        return [canvas.crop((left, top, left + side, top + side)) for top, left in corners], image

    def fitted(self, image: Image.Image) -> Image.Image:
        """Returns the canvas of one tile: an image that is not cut keeps its shape."""
        return self._on_canvas(image, fixed_size(self.form))

    def _on_canvas(self, image: Image.Image, size: Size) -> Image.Image:
        inner = fitted_size((image.height, image.width), size, fixed_size(self.form)[0])
        canvas = Image.new(image.mode, size[::-1])  # black
        canvas.paste(self.stretched(image, inner))
        return canvas


@frozen
class SplitResizer(TileResizer):
    """Resizes an image to a longer side, and then stretches it to whole tiles."""

    longest_side: int = field(kw_only=True)
    is_cut: bool = field(default=True, kw_only=True)

    def tiles(self, size: Size) -> tuple[int, int]:
        """Returns Idefics3's choice."""
        return split_grid(size, fixed_size(self.form), self.longest_side) if self.is_cut else (1, 1)

    def cut(self, image: Image.Image, grid: tuple[int, int]) -> tuple[Sequence[Image.Image], Image.Image]:
        """Returns tiles without bars, and the stretched image, which has the overview's size."""
        return split_image(image, fixed_size(self.form), self.longest_side, self.resampling)

    def fitted(self, image: Image.Image) -> Image.Image:
        """Resizes an image that is not cut in the same two steps, whose roundings matter."""
        return super().fitted(resized_to_longest(image, self.longest_side, self.resampling))


@frozen(kw_only=True)
class TilesResize(ResizeComponent):
    """Several images of the encoder's size (any-res), between black bars, as in LLaVA-NeXT."""

    title: ClassVar[str] = "tiles"
    """The name in messages."""

    max_tiles: int = field(default=0, validator=ge(0))
    """Tiles of an image at most, without the overview; 0: as many as a sequence has room for."""
    overview: Overview = "first"
    """Where the whole image stands, as one more image of the encoder's size. first: before its tiles, as in LLaVA-NeXT;
    last: after them, as in InternVL; none: nowhere. An image that fits into one tile has no overview."""

    def build(self, seen: ImageInput, patches: float | None = None) -> Resizer:
        """Builds it with the number of tiles that a sequence has room for, if no key bounds them."""
        return TilesResizer(seen.format, self.overview, max_tiles=self.most(seen))

    def most(self, seen: ImageInput) -> int:
        """Returns how many tiles an image may have."""
        room = min(seen.images_per_sequence, seen.patches_per_sequence // _patches(seen))
        # The overview takes a place of its image's tiles
        return self.max_tiles or room - (self.overview != "none")

    def size_problems(self, seen: ImageInput) -> Iterable[Problem]:
        """Checks encoder, adapter and fusion, and that a sequence has room for all tiles of an image."""
        if problems := list(_cut_problems(self.title, seen)):
            yield from problems
            return
        if message := seen.fusion.tile_problem():
            yield Problem("", f"{self.title!r} makes several images of one, and {message}")
        tiles = self.most(seen)
        if tiles < 2:
            hint = "take 2 or more, or leave it out" if self.max_tiles else "raise model.vision.images_per_sequence"
            why = "an image needs at least 2" if self.max_tiles else "a sequence has room for no more"
            yield Problem("max_tiles", f"{max(tiles, 0)}, and {why}; {hint}")
            return
        for needs in _room_problems(seen, tiles, self.overview):
            yield Problem("max_tiles", f"an image may become {tiles} tiles{needs}; raise it, or lower max_tiles")


@frozen(kw_only=True)
class AspectResize(TilesResize):
    """Several images of the encoder's size, stretched to the grid of nearest shape, as in InternVL."""

    title: ClassVar[str] = "aspect"

    def build(self, seen: ImageInput, patches: float | None = None) -> Resizer:
        """As `tiles`."""
        return AspectResizer(seen.format, self.overview, max_tiles=self.most(seen))


@frozen(kw_only=True)
class CanvasTilesResize(TilesResize):
    """Several images of the encoder's size, cut from black with the image at its top left, as in Llama 4."""

    title: ClassVar[str] = "canvas_tiles"

    def build(self, seen: ImageInput, patches: float | None = None) -> Resizer:
        """As `tiles`."""
        return CanvasTilesResizer(seen.format, self.overview, max_tiles=self.most(seen))

    def size_problems(self, seen: ImageInput) -> Iterable[Problem]:
        """Checks that tiles are squares, too."""
        if (grid := seen.format.grid) and grid[0] != grid[1]:
            yield Problem("", f"{self.title!r} has squares as tiles, and the encoder's images are {grid} patches")
        yield from super().size_problems(seen)


@frozen(kw_only=True)
class SplitResize(ResizeComponent):
    """Several images of the encoder's size, stretched to whole tiles, as in Idefics3 and SmolVLM."""

    title: ClassVar[str] = "split"
    """The name in messages."""

    longest_side: int = field(default=0, validator=and_(ge(0), le(LARGEST)))
    """Pixels of an image's longer side before it is stretched to whole tiles, whose number it determines; 0: four
    tiles."""
    cut: bool = True
    """Whether tiles are cut out. false: the image is resized in the same steps to one size (`do_image_splitting`)."""
    overview: Overview = "first"
    """Where the whole image stands, as one more image of the encoder's size: `first`, before its tiles; `last`, after
    them, as in Idefics3 and SmolVLM; or `none`. An image that fits into one tile has no overview."""

    def build(self, seen: ImageInput, patches: float | None = None) -> Resizer:
        """Builds it with the longer side of four tiles, if no key sets it."""
        return SplitResizer(seen.format, self.overview, longest_side=self.longest(seen), is_cut=self.cut)

    def longest(self, seen: ImageInput) -> int:
        """Returns the pixels of the longer side."""
        return self.longest_side or LONGEST * max(fixed_size(seen.format))

    def size_problems(self, seen: ImageInput) -> Iterable[Problem]:
        """Checks encoder, adapter and fusion, and that a sequence has room for the tiles of a square image."""
        if problems := list(_cut_problems(self.title, seen)):
            yield from problems
            return
        # Nothing is cut, so no image needs more room than one tile.
        if not self.cut:
            if self.overview != "first":
                yield Problem("overview", f"{self.overview!r}, but with cut = false no image has one; leave it out")
            return
        if message := seen.fusion.tile_problem():
            yield Problem("", f"{self.title!r} makes several images of one, and {message}")
        longest = self.longest(seen)
        tiles = most_tiles(fixed_size(seen.format), longest)
        for needs in _room_problems(seen, tiles, self.overview):
            has = f"a square image of {longest} pixels becomes {tiles} tiles{needs}"
            yield Problem("longest_side", f"{has}; raise it, or lower longest_side")


def _patches(seen: ImageInput) -> int:
    assert seen.format.grid is not None
    return math.prod(seen.format.grid)


def _cut_problems(title: str, seen: ImageInput) -> Iterator[Problem]:
    """Yields why images cannot be cut into several for this encoder and adapter."""
    if seen.format.joins_tiles:
        message = f"{title!r} makes each tile an image, but the adapter joins an image's tiles"
        yield Problem("", f"{message}; take 'any_resolution', or 'pad' for images in one tile")
    yield from one_size_problems(title, seen.format)


def _room_problems(seen: ImageInput, tiles: int, overview: Overview) -> Iterator[str]:
    """Yields the ends of sentences about images and patches of a sequence that do not suffice."""
    whole = int(overview != "none")
    for name, one in (("images_per_sequence", 1), ("patches_per_sequence", _patches(seen))):
        if (needed := (tiles + whole) * one) > (room := getattr(seen, name)):
            yield f"{' and an overview' * whole}, which need model.vision.{name} = {needed}, and it is {room}"
