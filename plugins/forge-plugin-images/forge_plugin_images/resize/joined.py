"""The types `canvas` and `any_resolution`: one image of several tiles, which encoder or adapter see together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge
from PIL import Image

from forge_core.contracts.errors import Problem
from forge_plugin_images.resize.kinds import Overview, ResizeComponent, Resizer, Size, fixed_size, smallest_problems
from forge_plugin_images.resize.one_size import PadResizer
from forge_plugin_images.tiling import best_tiles, canvas_of, fitted_size, shown_part, tiles_of
from forge_plugin_vision import Grid

if TYPE_CHECKING:
    from forge_plugin_vision import ImageInput


@frozen
class CanvasResizer(Resizer):
    """Puts an image at the top left of black, as large as the encoder's arrangement of tiles that suits it best."""

    def target(self, size: Size) -> Size:
        """Returns Llama 3.2 Vision's choice, in pixels."""
        rows, columns = canvas_of(size, self.step, self.form.arrangements)
        return rows * self.step, columns * self.step

    def fitted(self, image: Image.Image) -> Image.Image:
        """Returns the canvas."""
        height, width = self.target((image.height, image.width))
        inner = fitted_size((image.height, image.width), (height, width), self.step)
        canvas = Image.new(image.mode, (width, height))  # black
        canvas.paste(image.resize(inner[::-1], self.resampling))
        return canvas


@frozen
class AnyResolutionResizer(Resizer):
    """Makes an overview and tiles of the encoder's size, which an adapter joins: one grid."""

    max_tiled_images: int = 0
    """Images of a document that may be in tiles; 0: any number."""

    @property
    def overview(self) -> Overview:
        """Always first: the adapter expects it there."""
        return "first"

    def target(self, size: Size) -> Size:
        """Returns the size of a tile."""
        return fixed_size(self.form)

    def tiles(self, size: Size) -> tuple[int, int]:
        """Returns LLaVA-NeXT's choice among the adapter's arrangements."""
        return best_tiles(size, fixed_size(self.form), self.form.arrangements)

    def grids(self, size: Size) -> tuple[Grid, ...]:
        """Returns the one grid of all tiles, and what of them shows the image."""
        (rows, columns), [tile] = self.tiles(size), super().grids(size)
        return (Grid.of_tiles(rows, columns, shown_part(size, rows * tile.rows, columns * tile.columns)),)

    def images(self, image: Image.Image) -> Sequence[Image.Image]:
        """Returns the overview and the tiles, of which there may be a single one."""
        rows, columns = self.tiles((image.height, image.width))
        tiles = tiles_of(image, rows, columns, fixed_size(self.form), self.resampling)
        return [self.fitted(image), *tiles]

    def among(self, images: int) -> Resizer:
        """Returns what puts each image into one tile, if a document has more than `max_tiled_images`."""
        alone = not self.max_tiled_images or images <= self.max_tiled_images
        return self if alone else PadResizer(self.form)


@frozen(kw_only=True)
class CanvasResize(ResizeComponent):
    """As large as the tiles that suit it best, at the top left of black, as in Llama 3.2 Vision."""

    def build(self, seen: ImageInput, patches: float | None = None) -> Resizer:
        """Builds it with the arrangements of the encoder."""
        return CanvasResizer(seen.format)

    def size_problems(self, seen: ImageInput) -> Iterable[Problem]:
        """Checks that the encoder takes images in tiles."""
        form = seen.format
        if form.grid or not form.arrangements:
            hint = "'stretch', 'crop' or 'pad'" if form.grid else "'native' or 'fill'"
            yield Problem("", f"'canvas' is for encoders of images in tiles; take {hint}")

    def share_problems(self, seen: ImageInput) -> Iterable[Problem]:
        """Checks the canvas of one tile."""
        return smallest_problems(seen)


@frozen(kw_only=True)
class AnyResolutionResize(ResizeComponent):
    """An overview and tiles of the encoder's size, which the adapter joins (LLaVA-NeXT, LLaVA-OneVision)."""

    max_tiled_images: int = field(default=0, validator=ge(0))
    """Images of a document that may be in tiles; if it has more, each is in one tile, in the middle of a square of the
    mean colour. LLaVA-OneVision has 1. 0: any number is in tiles."""

    def build(self, seen: ImageInput, patches: float | None = None) -> Resizer:
        """Builds it with the arrangements of the adapter."""
        return AnyResolutionResizer(seen.format, self.max_tiled_images)

    def size_problems(self, seen: ImageInput) -> Iterable[Problem]:
        """Checks that the adapter joins tiles."""
        if not seen.format.joins_tiles:
            message = "'any_resolution' is for adapters that join an image's tiles"
            hint = 'take model.vision.adapter.type = "any_resolution" with an encoder of images of one size'
            yield Problem("", f"{message}; {hint}, or leave the table out")
