"""The types `stretch`, `crop` and `pad`, for encoders whose images have one size."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from attrs import frozen
from PIL import Image

from forge_plugin_images.resize.kinds import ResizeComponent, Resizer, Size, fixed_size, one_size_problems

if TYPE_CHECKING:
    from forge_core.contracts.errors import Problem
    from forge_plugin_vision import ImageInput


@frozen
class StretchResizer(Resizer):
    """Stretches every image to the encoder's size."""

    def target(self, size: Size) -> Size:
        """Returns the encoder's size."""
        return fixed_size(self.form)


@frozen
class CropResizer(StretchResizer):
    """Resizes an image until it just covers the encoder's size, and takes the middle."""

    def fitted(self, image: Image.Image) -> Image.Image:
        """Rounds as `get_resize_output_image_size` of transformers."""
        height, width = fixed_size(self.form)
        if height * image.width >= width * image.height:  # the height decides
            # Truncated there, too
            size = int(height * image.width / image.height), height
        else:
            size = width, int(width * image.height / image.width)
        left, top = (size[0] - width) // 2, (size[1] - height) // 2
        return image.resize(size, self.resampling).crop((left, top, left + width, top + height))


@frozen
class PadResizer(StretchResizer):
    """Puts an image into the middle of bars of the mean colour, which have the encoder's shape."""

    def fitted(self, image: Image.Image) -> Image.Image:
        """Pads before it resizes, as LLaVA-1.5."""
        height, width = fixed_size(self.form)
        # The mean truncated to whole levels, as `expand2square` of LLaVA has it
        colour = tuple(int(255 * mean) for mean in self.form.mean)
        return self.stretched(_padded(image, height / width, colour), (height, width))


@frozen(kw_only=True)
class StretchResize(ResizeComponent):
    """Stretched to the encoder's size, as in SigLIP."""

    title: ClassVar[str] = "stretch"
    """The name in messages."""
    suits_frames: ClassVar[bool] = True

    def build(self, seen: ImageInput, patches: float | None = None) -> Resizer:
        """Takes no heed of `patches`: an encoder of one size leaves no choice."""
        return StretchResizer(seen.format)

    def size_problems(self, seen: ImageInput) -> Iterable[Problem]:
        """Checks that the encoder has one size."""
        return one_size_problems(self.title, seen.format)


@frozen(kw_only=True)
class CropResize(StretchResize):
    """The middle of an image that just covers the encoder's size, as in CLIP."""

    title: ClassVar[str] = "crop"

    def build(self, seen: ImageInput, patches: float | None = None) -> Resizer:
        """As `stretch`."""
        return CropResizer(seen.format)


@frozen(kw_only=True)
class PadResize(StretchResize):
    """The whole image between bars of the mean colour, as in LLaVA-1.5."""

    title: ClassVar[str] = "pad"

    def build(self, seen: ImageInput, patches: float | None = None) -> Resizer:
        """As `stretch`."""
        return PadResizer(seen.format)


def _padded(image: Image.Image, ratio: float, colour: tuple[int, ...]) -> Image.Image:
    """Returns the image in the middle of a canvas whose height is `ratio` times its width."""
    width = max(image.width, round(image.height / ratio))
    height = max(image.height, round(image.width * ratio))
    canvas = Image.new(image.mode, (width, height), colour)
    canvas.paste(image, ((width - image.width) // 2, (height - image.height) // 2))
    return canvas
