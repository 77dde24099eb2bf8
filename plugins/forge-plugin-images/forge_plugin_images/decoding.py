"""Opens images: their size from the header alone, or their pixels as RGB, upright."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np
from attrs import define, field, frozen
from PIL import Image

from forge_plugin_images.image_file import BrokenImage, ImageFile

ORIENTATION = 0x0112
"""Tag of EXIF."""
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What makes an image of each orientation upright."""
ON_ITS_SIDE = (5, 6, 7, 8)
"""Orientations whose width and height are exchanged."""


@frozen
class FileImage:
    """An image in a file."""

    name: str

    def open(self) -> BinaryIO:
        return open(self.name, "rb")


@define
class UrlImage:
    """An image at a URL that fsspec opens, such as a file of a dataset on the hub. It is fetched once."""

    name: str
    _data: bytes | None = field(default=None, init=False)

    def open(self) -> BinaryIO:
        if self._data is None:
            import fsspec  # comes with `datasets`, whose streams have such URLs

            with fsspec.open(self.name, "rb") as stream:
                self._data = stream.read()
        return io.BytesIO(self._data)


@frozen
class BytesImage:
    """An image in memory."""

    name: str
    data: bytes

    def open(self) -> BinaryIO:
        return io.BytesIO(self.data)


@frozen
class SectionImage:
    """An image in a part of a file, such as a member of an archive."""

    name: str
    path: str
    start: int
    size: int

    def open(self) -> BinaryIO:
        return io.BufferedReader(_Section(self))


class _Section(io.RawIOBase):
    """Reads a part of a file, so that a header costs no more than its own bytes."""

    def __init__(self, section: SectionImage) -> None:
        self._file = io.FileIO(section.path)
        self._start, self._size, self._at = section.start, section.size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self._size)[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        data = self._file.read(max(0, min(len(buffer), self._size - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def size_of(file: ImageFile) -> tuple[int, int]:
    """Returns height and width of the upright image, from its header.

    Raises:
        BrokenImage: it has none that can be read.
    """
    with _opened(file) as image:
        width, height = image.size
        return (width, height) if _orientation(image) in ON_ITS_SIDE else (height, width)


def decode(file: ImageFile) -> Image.Image:
    """Returns the upright image in RGB: transparent parts are white, greys of 16 bits lose the lower 8.

    Raises:
        BrokenImage: it cannot be decoded to its end.
    """
    with _opened(file) as image:
        turn = TURNS.get(_orientation(image))
        rgb = _rgb(image)
        return rgb if turn is None else rgb.transpose(turn)


@contextmanager
def _opened(file: ImageFile) -> Iterator[Image.Image]:
    # Decoders raise whatever a damaged file leads them to: OSError, SyntaxError, struct.error, ValueError, …
    try:
        with file.open() as stream, Image.open(stream) as image:
            yield image
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
        raise BrokenImage(f"image {file.name!r} cannot be read ({reason})") from error


def _orientation(image: Image.Image) -> int:
    # Pillow would decode a whole PNG to look for EXIF after its pixels; only what stands before them counts.
    if image.format == "PNG" and "exif" not in image.info:
        return 1
    return int(image.getexif().get(ORIENTATION, 1))


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB":
        image.load()
        return image.copy()
    if image.mode.startswith("I"):  # convert() would clip 16 bits instead of dividing them
        return Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        colours = image.convert("RGBA")
        paper = Image.new("RGBA", colours.size, "white")
        return Image.alpha_composite(paper, colours).convert("RGB")
    return image.convert("RGB")
