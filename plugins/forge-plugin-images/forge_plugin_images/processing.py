"""Resizes images to grids of patches, by arithmetic that image processors of known checkpoints share.

V: values of a patch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import numpy as np
from attrs import evolve, field, frozen
from PIL import Image

from forge_plugin_images.decoding import ImageDecoder, Mode
from forge_plugin_images.patches import grid_of, patches_of
from forge_plugin_images.splitting import (
    nearest_shape,
    resized_to_longest,
    split_grid,
    split_image,
    stretched_tiles,
)
from forge_plugin_images.tiling import (
    best_tiles,
    canvas_of,
    fitted_size,
    shown_part,
    tile_grid,
    tiles_of,
)
from forge_plugin_vision import Grid

if TYPE_CHECKING:
    from forge_plugin_images.image_file import ImageFile
    from forge_plugin_images.source import Overview
    from forge_plugin_vision import ImageFormat

Policy = Literal[
    "native", "fill", "longest", "stretch", "crop", "pad", "tiles", "aspect", "split", "canvas", "any_resolution"
]
"""How an image gets the size of a grid. `native` (Qwen2-VL's `smart_resize`), `fill` (SigLIP 2's NaFlex) and `longest`
(Pixtral) keep its shape nearly; the others make images of one size, as SigLIP (`stretch`), CLIP (`crop`) and LLaVA-1.5
(`pad`) do, or several of one size (`tiles`; `aspect`, InternVL; `split`, Idefics3). `canvas` and `any_resolution` make
one image of several tiles, which the encoder sees together (Llama 3.2 Vision), or which an adapter joins behind it
(LLaVA-NeXT, LLaVA-OneVision)."""
RESAMPLING = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}

Size = tuple[int, int]
"""Height and width in pixels."""


@frozen
class ImageProcessor:
    """Turns images into patches, as an encoder's format and a policy say."""

    form: ImageFormat
    policy: Policy
    max_patches: float
    """Of an image, for `native` and `fill`."""
    min_patches: int = 0
    """Of an image, for `native`: smaller ones are enlarged."""
    max_tiles: int = 0
    """Of an image, for `tiles`, without the overview; for `split` 1, if images are not cut."""
    overview: Overview = "first"
    """For `tiles` and `split`."""
    max_tiled_images: int = 0
    """For `any_resolution`: images of a document that may be in tiles; 0: all of them."""
    longest_side: int = 0
    """Pixels of the longer side, for `split` and `longest`, before an image is stretched to whole tiles or patches."""
    decoder: ImageDecoder = field(factory=ImageDecoder)
    """What opens images."""

    def read(self, file: ImageFile) -> np.ndarray:
        """Returns the patches of an encoded image, (patches, V) uint8; raises `BrokenImage`."""
        return self.patches(self.decoder.decode(file, self._mode))

    def among(self, images: int) -> ImageProcessor:
        """Returns what processes each image of a document that has this many."""
        alone = not self.max_tiled_images or images <= self.max_tiled_images
        return self if alone or self.policy != "any_resolution" else evolve(self, policy="pad")

    @property
    def _mode(self) -> Mode:
        return "L" if self.form.channels == 1 else "RGB"

    @property
    def step(self) -> int:
        """Pixels that sides are multiples of."""
        return self.form.patch * self.form.multiple

    def grids(self, size: Size) -> tuple[Grid, ...]:
        """Returns the grids of an image of this size: one, or one for each tile and the overview."""
        if self.policy == "any_resolution":
            (rows, columns), (_, *tile) = self.tiles(size), grid_of(*self._target(size), self.form)
            shown = shown_part(size, rows * tile[0], columns * tile[1])
            return (Grid.of_tiles(rows, columns, shown),)
        count = math.prod(self.tiles(size))
        if count > 1:
            count += self.overview != "none"
        return (grid_of(*self._target(size), self.form),) * count

    def patches(self, image: Image.Image) -> np.ndarray:
        """Returns the patches of an image, one grid after the other: (patches, V) uint8."""
        # Frames of a video are RGB, also for an encoder of grey images
        if image.mode != self._mode:
            image = image.convert(self._mode)
        rows, columns = self.tiles((image.height, image.width))
        if rows * columns == 1 and self.policy != "any_resolution":
            return self._resized(image)
        resampling = RESAMPLING[self.form.resample]
        if self.policy == "split":
            # The argument is not read: with these policies tiles have one size.
            tiles, whole = split_image(image, self._target((0, 0)), self.longest_side, resampling)
        elif self.policy == "aspect":
            tiles, whole = stretched_tiles(image, (rows, columns), self._target((0, 0)), resampling), image
        else:
            tiles, whole = list(tiles_of(image, rows, columns, self._target((0, 0)), resampling)), image
        parts = [patches_of(np.asarray(tile), self.form) for tile in tiles]
        overview = [] if self.overview == "none" else [self._fitted(whole)]
        return np.concatenate([*overview, *parts] if self.overview == "first" else [*parts, *overview])

    def _resized(self, image: Image.Image) -> np.ndarray:
        """Returns the patches of the whole image as one: (patches, V) uint8."""
        if self.policy == "split":
            image = resized_to_longest(image, self.longest_side, RESAMPLING[self.form.resample])
        return self._fitted(image)

    def _fitted(self, image: Image.Image) -> np.ndarray:
        """Returns the patches of an image that gets its last size: (patches, V) uint8."""
        height, width = self._target((image.height, image.width))
        if self.policy == "canvas":
            image = self._on_canvas(image, (height, width))
        elif self.policy == "pad":
            # The mean truncated to whole levels, as `expand2square` of LLaVA has it
            image = _padded(image, height / width, tuple(int(255 * mean) for mean in self.form.mean))
        elif self.policy == "crop":
            image = _covering(image, (height, width), RESAMPLING[self.form.resample])
        # After a crop or on a canvas the size is right, and Pillow would copy the pixels once more
        if image.size != (width, height):
            image = image.resize((width, height), RESAMPLING[self.form.resample])
        return patches_of(np.asarray(image), self.form)

    def _on_canvas(self, image: Image.Image, target: Size) -> Image.Image:
        """Returns the image at the top left of black of the target's size."""
        height, width = fitted_size((image.height, image.width), target, self.step)
        canvas = Image.new(image.mode, (target[1], target[0]))  # black
        canvas.paste(image.resize((width, height), RESAMPLING[self.form.resample]))
        return canvas

    def key(self) -> list[object]:
        """Returns everything that patches depend on, other than the image."""
        form = self.form
        shape = [form.patch, form.frames, form.channels, form.grid, form.multiple]
        # Only what the policy reads, so that other keys do not invalidate measurements in the cache
        tiling: list[object] = [self.max_tiles, self.overview] if self.policy in ("tiles", "aspect", "split") else []
        tiling += [self.longest_side] if self.policy in ("split", "longest") else []
        tiling += [self.max_tiled_images] if self.policy == "any_resolution" else []
        tiling += [form.pixels] if form.pixels else []
        tiling += [form.arrangements] if form.arrangements else []
        return [
            *shape,
            form.resample,
            form.mean,
            self.policy,
            self.max_patches,
            self.min_patches,
            *tiling,
            *self.decoder.key(),
        ]

    def tiles(self, size: Size) -> tuple[int, int]:
        """Returns rows and columns of the tiles of an image of this size; (1, 1) if it is one grid."""
        if self.policy == "any_resolution":
            return best_tiles(size, self._target(size), self.form.arrangements)
        if self.policy == "aspect":
            return nearest_shape(size, self._target(size), self.max_tiles)
        if self.policy == "tiles":
            return tile_grid(size, self._target(size), self.max_tiles)
        if self.policy == "split" and self.max_tiles != 1:
            return split_grid(size, self._target(size), self.longest_side)
        return 1, 1

    def _target(self, size: Size) -> Size:
        if self.policy == "native":
            return native_size(size, self.step, self.min_patches * self.form.patch**2, self._max_pixels)
        if self.policy == "fill":
            return filling_size(size, self.step, self._max_pixels)
        if self.policy == "longest":
            return size_within(size, self.step, self.longest_side)
        if self.policy == "canvas":
            rows, columns = canvas_of(size, self.step, self.form.arrangements)
            return rows * self.step, columns * self.step
        assert self.form.grid is not None
        if self.form.pixels:
            return self.form.pixels
        return self.form.grid[0] * self.form.patch, self.form.grid[1] * self.form.patch

    @property
    def _max_pixels(self) -> int:
        return int(self.max_patches * self.form.patch**2)


def native_size(size: Size, step: int, min_pixels: int, max_pixels: int) -> Size:
    """Returns the nearest size whose sides are multiples of `step`, within these bounds of its area.

    This is `smart_resize` of Qwen2-VL, but for very long images, which it refuses: here the area holds for them too.
    """
    height, width = size
    rows, columns = max(1, round(height / step)), max(1, round(width / step))
    if rows * columns * step**2 > max_pixels:
        ratio = math.sqrt(height * width / max_pixels)
        rows, columns = max(1, math.floor(height / ratio / step)), max(1, math.floor(width / ratio / step))
        most = max_pixels // step**2
        # Rounding up to one row or column may exceed the bound again, for very long images.
        rows, columns = min(rows, most // columns or 1), min(columns, most)
    elif rows * columns * step**2 < min_pixels:
        ratio = math.sqrt(min_pixels / (height * width))
        rows, columns = math.ceil(height * ratio / step), math.ceil(width * ratio / step)
    return rows * step, columns * step


def filling_size(size: Size, step: int, max_pixels: int, precision: float = 1e-5) -> Size:
    """Returns the largest size of the image's shape, sides rounded up to multiples of `step`, within `max_pixels`.

    This is `get_image_size_for_max_num_patches` of SigLIP 2, which looks for the scale by bisection.
    """

    def scaled(scale: float) -> Size:
        height, width = (max(step, math.ceil(side * scale / step) * step) for side in size)
        return height, width

    # The bounds of the reference, on which the last step of the bisection depends
    low, high = precision / 10, 100.0
    while high - low >= precision:
        middle = (low + high) / 2
        if math.prod(scaled(middle)) <= max_pixels:
            low = middle
        else:
            high = middle
    return scaled(low)


def size_within(size: Size, step: int, longest: int) -> Size:
    """Returns the image's size, or that of its shape with `longest` pixels at most, rounded up to multiples of `step`.

    This is `get_resize_output_image_size` of Pixtral, but for images so narrow that it leaves none of their width.
    """
    height, width = size
    if (ratio := max(height / longest, width / longest)) > 1:
        height, width = math.floor(height / ratio), math.floor(width / ratio)
    return max(1, -(-height // step)) * step, max(1, -(-width // step)) * step


def _padded(image: Image.Image, ratio: float, colour: tuple[int, ...]) -> Image.Image:
    """Returns the image in the middle of a canvas whose height is `ratio` times its width."""
    width = max(image.width, round(image.height / ratio))
    height = max(image.height, round(image.width * ratio))
    canvas = Image.new(image.mode, (width, height), colour)
    canvas.paste(image, ((width - image.width) // 2, (height - image.height) // 2))
    return canvas


def _covering(image: Image.Image, target: Size, resampling: Image.Resampling) -> Image.Image:
    """Returns the middle of the image, resized until it just covers the target."""
    height, width = target
    if height * image.width >= width * image.height:  # the height decides
        # Truncated, as `get_resize_output_image_size` of transformers
        size = int(height * image.width / image.height), height
    else:
        size = width, int(width * image.height / image.width)
    left, top = (size[0] - width) // 2, (size[1] - height) // 2
    return image.resize(size, resampling).crop((left, top, left + width, top + height))
