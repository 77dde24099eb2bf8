"""What a document shows beside its text: images, and whatever else is made of grids of patches.

V: values of a patch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from attrs import define, evolve, field, frozen

from forge_core.contracts.errors import JobError
from forge_plugin_images.image_file import ImageFile
from forge_plugin_images.rows import Footprint, Tokens
from forge_plugin_images.video_kind import NO_TABLE, Span, span_of

if TYPE_CHECKING:
    from forge_plugin_images.processing import ImageProcessor
    from forge_plugin_images.records import ImageSource, Record
    from forge_plugin_images.tile_text import TileTexts
    from forge_plugin_images.video_kind import Videos
    from forge_plugin_vision import ImageInput


class Visual(Protocol):
    """Something to be seen, encoded in a file. It is measured when documents are counted, and read when a row is."""

    def measure(self) -> Footprint:
        """Returns what it takes in a row, by its headers alone: nothing is decoded.

        It depends on nothing but the file and the job, so that a row has room for what `read` returns.

        Raises:
            BrokenImage: the headers cannot be read.
        """

    def read(self) -> np.ndarray:
        """Returns the patches of the grids of `measure`, one grid after the other: (patches, V) uint8.

        Raises:
            BrokenImage: it cannot be decoded.
        """

    def check(self) -> None:
        """Decode all that any choice of frames may show; raises `BrokenImage`."""


class VisualSource(Protocol):
    """Makes visuals of the values in records."""

    @property
    def seen(self) -> ImageInput:
        """What the model sees."""

    def file(self, record: Record, value: Any) -> ImageFile:
        """Returns the file that a value refers to, for visuals of other kinds; raises `JobError` if to none."""

    def image(self, record: Record, value: Any) -> Visual:
        """Returns the image that a value refers to; raises `JobError` if it refers to none."""

    def video(self, record: Record, value: Any, span: Span | None = None) -> Visual:
        """Returns the clip that a value refers to.

        Args:
            record: which has the value.
            value: as of an image, or a mapping with such a one as `video` or `path`, and `start` and `end` in seconds.
            span: the part that is shown; None: as specified by the value, or all of it.

        Raises:
            JobError: it refers to none, or the source has no table `video`.
        """


@frozen
class ImageVisual:
    """An image: one grid, or with tiles several, each with its positions side by side, and texts. See `Visual`."""

    file: ImageFile
    processor: ImageProcessor
    seen: ImageInput
    texts: TileTexts | None = None
    """None: there are none."""

    def measure(self) -> Footprint:
        """Reads the size from the image's header, and computes its grids."""
        size = self.processor.decoder.size(self.file)
        grids = self.processor.grids(size)
        if self.texts is None:
            return Footprint.of_images(grids, self.seen)
        resizer = self.processor.resizer
        tiles = resizer.tiles(size) if len(grids) > 1 else (1, 1)  # joined tiles have no texts between
        return self.texts.footprint(grids, tiles, resizer.overview, self.seen)

    def read(self) -> np.ndarray:
        """Decodes the image, and resizes it to the grids of `measure`."""
        return self.processor.read(self.file)

    def check(self) -> None:
        """Reads the header as well as the pixels, since either may be refused."""
        self.measure()
        self.read()

    def among(self, images: int) -> ImageVisual:
        """Returns it as one of this many images of a document."""
        return evolve(self, processor=self.processor.among(images))


def as_one_document(parts: Sequence[Tokens | Visual]) -> list[Tokens | Visual]:
    """Returns the parts of a document, whose images may be processed otherwise if there are several of them."""
    images = sum(isinstance(part, ImageVisual) for part in parts)
    return [part.among(images) if isinstance(part, ImageVisual) else part for part in parts]


@define
class Visuals:
    """See `VisualSource`: the visuals of a document, as the job's model sees them."""

    files: ImageSource
    processor: ImageProcessor
    seen: ImageInput
    texts: TileTexts | None = None
    """Around images and their tiles; None: there are none."""
    videos: Videos | None = None
    draw: str | None = None
    """What random choices of the document are seeded with; None: none is made."""
    _clips: int = field(default=0, init=False)

    def file(self, record: Record, value: Any) -> ImageFile:
        """Returns the encoded file, which is not opened here."""
        return self.files.image(record, value)

    def image(self, record: Record, value: Any) -> Visual:
        """Opens nothing: a broken image is found when the visual is measured."""
        return ImageVisual(self.files.image(record, value), self.processor, self.seen, self.texts)

    def video(self, record: Record, value: Any, span: Span | None = None) -> Visual:
        """Counts the clips of the document, so that each has other random numbers."""
        if self.videos is None:
            raise JobError(f"{record.place}: {NO_TABLE}")
        if isinstance(value, Mapping):
            span = span or span_of(record, value)
            value = value.get("video", value)
        draw = None if self.draw is None else f"{self.draw} {self._clips}"
        self._clips += 1
        return self.videos.visual(self.files.image(record, value), span or Span(), draw)
