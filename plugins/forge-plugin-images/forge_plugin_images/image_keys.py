"""Keys of the datasets whose documents have images."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import attrs
from attrs import field, frozen
from attrs.validators import gt, optional

from forge_plugin_images.image_file import MAX_PIXELS, GreyRange
from forge_plugin_images.resize import AutoResize, ResizeComponent
from forge_plugin_images.source import DocumentDataset
from forge_plugin_images.tile_text import TileText, TileTexts, row_problems

if TYPE_CHECKING:
    from forge_core.contracts.data import Tokenizer
    from forge_core.contracts.errors import Problem
    from forge_plugin_images.processing import ImageProcessor
    from forge_plugin_vision import ImageInput


def _black_below_white(_: Any, attribute: attrs.Attribute, value: GreyRange) -> None:
    if not value[0] < value[1]:
        raise ValueError(f"{attribute.name!r} must be [black, white], the lower value first, not {list(value)}")


# Without slots, as all mixins here: Python cannot lay out an instance with slots of two base classes.
@frozen(kw_only=True, slots=False)
class HasImages(DocumentDataset):
    """Documents with images."""

    resize: ResizeComponent = field(factory=AutoResize)
    """`[data.sources.resize]`: how images get their size."""
    tile_text: TileText | None = None
    """`[data.sources.tile_text]`: texts around images and their tiles, such as `<row_1_col_1>`; None: none."""
    grey_range: GreyRange | None = field(default=None, validator=optional(_black_below_white))
    """In greys of more than 8 bits: the values that are black and white, such as [0, 4095] for 12 bits. Left out: the
    values that the file declares, if any; 16 bits lose the lower 8, and others are refused."""
    max_pixels: int = field(default=MAX_PIXELS, validator=gt(0))
    """Images with more pixels cannot be read. A worker takes 4 to 20 bytes for each pixel, by format."""

    def tile_texts(self, tokenizer: Tokenizer) -> TileTexts | None:
        """Returns the tokens of `tile_text`."""
        return None if self.tile_text is None else TileTexts(self.tile_text, tokenizer)

    def processor(self, seen: ImageInput) -> ImageProcessor:
        """Returns what opens, resizes and cuts images as the keys have it."""
        from forge_plugin_images.decoding import ImageDecoder
        from forge_plugin_images.processing import ImageProcessor

        return ImageProcessor(self.resize.build(seen), ImageDecoder(self.grey_range, self.max_pixels))

    def visual_problems(self, seen: ImageInput) -> Iterator[Problem]:
        """Checks the room of an image, and texts between rows of features; `resize` checks itself."""
        yield from super().visual_problems(seen)
        yield from (problem.below("resize") for problem in self.resize.share_problems(seen))
        if self.tile_text is not None:
            yield from (problem.below("tile_text") for problem in row_problems(self.tile_text, seen))
