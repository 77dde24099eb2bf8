"""The types `native`, `fill`, `budget`, `longest` and `top_left`, for encoders whose images have any size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, ClassVar

from attrs import field, frozen
from attrs.validators import ge, gt
from PIL import Image

from forge_core.contracts.errors import Problem
from forge_plugin_images.resize.kinds import (
    ResizeComponent,
    Resizer,
    Size,
    any_size_problems,
    share_of,
    smallest_problems,
)

if TYPE_CHECKING:
    from forge_plugin_vision import ImageFormat, ImageInput


@frozen
class NativeResizer(Resizer):
    """Gives an image the nearest size of whole patches, within bounds of its area."""

    max_patches: float
    min_patches: int = 0
    """Smaller images are enlarged to as many."""

    def target(self, size: Size) -> Size:
        """Returns `native_size`."""
        area = self.form.patch**2
        return native_size(size, self.step, self.min_patches * area, int(self.max_patches * area))


@frozen
class FillResizer(Resizer):
    """Makes an image as large as a bound of its area allows."""

    max_patches: float

    def target(self, size: Size) -> Size:
        """Returns `filling_size`."""
        return filling_size(size, self.step, int(self.max_patches * self.form.patch**2))


@frozen
class BudgetResizer(FillResizer):
    """Makes an image as large as a bound of its area allows, with whole squares of the adapter within that."""

    def target(self, size: Size) -> Size:
        """Returns `size_in_budget`."""
        return size_in_budget(size, self.step, int(self.max_patches * self.form.patch**2))


@frozen
class LongestResizer(Resizer):
    """Gives an image the next larger size of whole patches, if its longer side is within a bound."""

    longest_side: int
    """Pixels at most, before both sides are rounded up."""

    def target(self, size: Size) -> Size:
        """Returns `size_within`."""
        return size_within(size, self.step, self.longest_side)


@frozen
class TopLeftResizer(Resizer):
    """Puts an image at the top left of black of whole patches, smaller only where a bound requires it."""

    max_patches: int
    """Whole patches at most, before both sides are rounded up."""
    max_side: int
    """Patches along a side at most."""

    def target(self, size: Size) -> Size:
        """Returns the sides of `size_in_patches`, rounded up."""
        height, width = (-(-side // self.step) * self.step for side in self.inner(size))
        return height, width

    def inner(self, size: Size) -> Size:
        """Returns the size of the image on it."""
        return size_in_patches(size, self.form.patch, self.max_patches, self.max_side)

    def fitted(self, image: Image.Image) -> Image.Image:
        """Pads after it resizes, as Kimi-K2.5."""
        size = image.height, image.width
        height, width = self.target(size)
        resized = self.stretched(image, self.inner(size))
        if resized.size == (width, height):
            return resized
        canvas = Image.new(image.mode, (width, height))
        canvas.paste(resized, (0, 0))
        return canvas


@frozen(kw_only=True)
class FillResize(ResizeComponent):
    """As large as `max_patches` allows, in the image's shape, as in SigLIP 2 NaFlex."""

    title: ClassVar[str] = "fill"
    """The name in messages."""
    suits_frames: ClassVar[bool] = True

    max_patches: int = field(default=0, validator=ge(0))
    """Patches of an image at most; 0: the model's for a sequence, shared by its images. Of a frame of a video at most;
    0: as many as fit."""

    def build(self, seen: ImageInput, patches: float | None = None) -> Resizer:
        """Builds it with the smaller of both bounds."""
        return FillResizer(seen.format, self.bound(seen, patches))

    def bound(self, seen: ImageInput, patches: float | None) -> float:
        """Returns the patches of an image at most, of which there may be a fraction where frames share a clip's."""
        if patches is None:
            return self.max_patches or share_of(seen)
        return min(patches, self.max_patches or patches)

    def size_problems(self, seen: ImageInput) -> Iterator[Problem]:
        """Checks the encoder, and the bound against a sequence and the smallest image."""
        if problems := list(any_size_problems(self.title, seen.format)):
            yield from problems
            return
        most, least = self.max_patches, seen.format.multiple**2
        if 0 < most < least:
            yield Problem("max_patches", f"{most}, and the smallest image has {least} with this adapter; raise it")
        if most > seen.patches_per_sequence:
            room = f"model.vision.patches_per_sequence = {seen.patches_per_sequence}"
            yield Problem("max_patches", f"{most}, and a sequence has {room}; lower the one or raise the other")

    def share_problems(self, seen: ImageInput) -> Iterator[Problem]:
        """Checks the smallest image, if no key bounds images."""
        if not self.max_patches:
            yield from smallest_problems(seen)


@frozen(kw_only=True)
class BudgetResize(FillResize):
    """As large as `max_patches` allows, in the image's shape, both sides rounded down, as in Gemma 4."""

    title: ClassVar[str] = "budget"

    def build(self, seen: ImageInput, patches: float | None = None) -> Resizer:
        """As `fill`."""
        return BudgetResizer(seen.format, self.bound(seen, patches))


@frozen(kw_only=True)
class NativeResize(FillResize):
    """The nearest size whose sides are whole patches; smaller only where `max_patches` requires it (Qwen2-VL)."""

    title: ClassVar[str] = "native"

    min_patches: int = field(default=0, validator=ge(0))
    """Smaller images are enlarged to as many patches. No frame of a video is made smaller than that: fewer frames are
    chosen instead."""

    def build(self, seen: ImageInput, patches: float | None = None) -> Resizer:
        """Builds it with the smaller of both upper bounds."""
        return NativeResizer(seen.format, self.bound(seen, patches), self.min_patches)

    def smallest(self, form: ImageFormat) -> int:
        """Returns `min_patches` if they are more than the adapter merges."""
        return max(self.min_patches, super().smallest(form))

    def size_problems(self, seen: ImageInput) -> Iterator[Problem]:
        """Checks the lower bound, too."""
        yield from super().size_problems(seen)
        if 0 < self.max_patches < self.min_patches:
            yield Problem("min_patches", f"{self.min_patches} is more than max_patches, which is {self.max_patches}")

    def share_problems(self, seen: ImageInput) -> Iterator[Problem]:
        """Checks the lower bound, too."""
        yield from super().share_problems(seen)
        if not self.max_patches and self.min_patches > (most := share_of(seen)):
            yield Problem("min_patches", f"{self.min_patches} is more than an image's share of a sequence, {most}")


@frozen(kw_only=True)
class LongestResize(ResizeComponent):
    """The next larger size whose sides are whole patches; smaller only where `longest_side` requires it (Pixtral)."""

    title: ClassVar[str] = "longest"
    """The name in messages."""

    longest_side: int = field(default=0, validator=ge(0))
    """Pixels of an image's longer side at most, before both sides are rounded up; 0: what an image's share of the
    patches of a sequence makes of a square."""

    def build(self, seen: ImageInput, patches: float | None = None) -> Resizer:
        """Builds it with the bound of a side; one by `patches` it does not have."""
        return LongestResizer(seen.format, self.longest(seen))

    def longest(self, seen: ImageInput) -> int:
        """Returns the pixels of the longer side at most."""
        multiple = seen.format.multiple
        return self.longest_side or max(math.isqrt(share_of(seen)) // multiple, 1) * multiple * seen.format.patch

    def size_problems(self, seen: ImageInput) -> Iterable[Problem]:
        """Checks the encoder, and that a sequence has room for a square image."""
        if problems := list(any_size_problems(self.title, seen.format)):
            yield from problems
            return
        longest, multiple = self.longest(seen), seen.format.multiple
        patches = (-(-longest // (multiple * seen.format.patch)) * multiple) ** 2
        if patches > seen.patches_per_sequence:
            message = f"a square image of {longest} pixels has {patches} patches"
            room = f"model.vision.patches_per_sequence = {seen.patches_per_sequence}"
            yield Problem("longest_side", f"{message}, and a sequence has {room}; raise it, or lower longest_side")

    def share_problems(self, seen: ImageInput) -> Iterable[Problem]:
        """Checks the smallest image, if no key bounds images."""
        return () if self.longest_side else smallest_problems(seen)


@frozen(kw_only=True)
class TopLeftResize(ResizeComponent):
    """At the top left of black, whose sides are whole patches; smaller only where a bound requires it (Kimi-K2.5)."""

    title: ClassVar[str] = "top_left"
    """The name in messages."""

    max_patches: int = field(default=16384, validator=gt(0))
    """Patches of an image at most, before both sides are rounded up: black may add some."""
    max_side: int = field(default=512, validator=gt(0))
    """Patches along a side at most."""

    def build(self, seen: ImageInput, patches: float | None = None) -> Resizer:
        """Builds it with its own bounds; one by `patches` it does not have."""
        return TopLeftResizer(seen.format, self.max_patches, self.max_side)

    def size_problems(self, seen: ImageInput) -> Iterable[Problem]:
        """Checks the encoder, the bound of a side, and that a sequence has room for an image of the most patches."""
        if problems := list(any_size_problems(self.title, seen.format)):
            yield from problems
            return
        if self.max_side % seen.format.multiple:
            message = f"{self.max_side}, and both sides are multiples of {seen.format.multiple} patches"
            yield Problem("max_side", f"{message} with this adapter")
        if self.max_patches > seen.patches_per_sequence:
            room = f"model.vision.patches_per_sequence = {seen.patches_per_sequence}"
            yield Problem(
                "max_patches", f"{self.max_patches}, and a sequence has {room}; lower the one or raise the other"
            )


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


def size_in_budget(size: Size, step: int, max_pixels: int) -> Size:
    """Returns the size of the image's shape with `max_pixels`, sides rounded down to multiples of `step`.

    This is `get_aspect_ratio_preserving_size` of Gemma 4. `max_pixels` are a square of `step` or more.
    """
    height, width = size
    factor = math.sqrt(max_pixels / (height * width))
    rows, columns = math.floor(factor * height / step), math.floor(factor * width / step)
    most = max(max_pixels // step**2, 1)
    if not rows:  # as many squares side by side as the image has of its height
        rows, columns = 1, min(width // height, most)
    elif not columns:
        rows, columns = min(height // width, most), 1
    return rows * step, columns * step


def size_within(size: Size, step: int, longest: int) -> Size:
    """Returns the image's size, with a longer side of `longest` pixels at most, rounded up to multiples of `step`.

    This is `get_resize_output_image_size` of Pixtral, but for images so narrow that it leaves none of their width.
    """
    height, width = size
    if (ratio := max(height / longest, width / longest)) > 1:
        height, width = math.floor(height / ratio), math.floor(width / ratio)
    return max(1, -(-height // step)) * step, max(1, -(-width // step)) * step


def size_in_patches(size: Size, patch: int, max_patches: int, max_side: int) -> Size:
    """Returns the image's size, made smaller until it has `max_patches` whole patches and sides of `max_side` at most.

    This is `navit_resize` of Kimi-K2.5, without what it pads. Sides are not whole patches.
    """
    height, width = size
    whole = max(1, height // patch) * max(1, width // patch)
    sides = (max_side * patch / side for side in size)
    scale = min(1.0, math.sqrt(max_patches / whole), *sides)
    # Rounding may leave nothing of a very narrow image, or a pixel too much
    return min(max(1, int(height * scale)), max_side * patch), min(max(1, int(width * scale)), max_side * patch)
