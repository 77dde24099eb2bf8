"""Opens images: their size from the header alone, or their pixels, upright, as RGB or grey."""

from __future__ import annotations

import io
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, Literal

import numpy as np
from attrs import define, field, frozen
from PIL import Image, UnidentifiedImageError
from PIL.ImageFile import ImageFile as PillowFile

from forge_kit.data.data_files import open_regular
from forge_plugin_images.greys import DARK, is_deep, levels, unknown_range
from forge_plugin_images.image_file import MAX_PIXELS, BrokenImage, GreyRange, ImageFile
from forge_plugin_images.signatures import reason_unidentified

Mode = Literal["RGB", "L"]
"""Of Pillow."""
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
PALETTE_STEPS = {"L;2": 85, "L;4": 17}
"""What Pillow multiplies greys of 2 and 4 bits of a PNG by, but not the grey that is transparent."""
XMP, RAW_EXIF = "XML:com.adobe.xmp", "Raw profile type exif"
"""Texts of a PNG that may have an orientation."""
_opening = threading.Lock()


@frozen
class FileImage:
    """An image in a file."""

    name: str

    def open(self) -> BinaryIO:
        """Opens the file; raises `OSError` for a pipe or a device, which may never end."""
        return open_regular(self.name)


@define
class UrlImage:
    """An image at a URL that fsspec opens, such as a file of a dataset on the hub. It is fetched once."""

    name: str
    _data: bytes | None = field(default=None, init=False)

    def open(self) -> BinaryIO:
        """Returns the content in memory: measuring and decoding each open the image, and it is fetched once."""
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
        """Returns a new stream at the beginning of the bytes."""
        return io.BytesIO(self.data)


@frozen
class SectionImage:
    """An image in a part of a file, such as a member of an archive."""

    name: str
    path: str
    start: int
    size: int

    def open(self) -> BinaryIO:
        """Returns a buffered stream of the section alone; positions count from its start."""
        return io.BufferedReader(_Section(self))


class _Section(io.RawIOBase):
    """Reads a part of a file, so that a header costs no more than its own bytes."""

    def __init__(self, section: SectionImage) -> None:
        # Unbuffered, since the `BufferedReader` around it has a buffer already
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
        # Never beyond the section: the next member of the archive would look like more of this image
        data = self._file.read(max(0, min(len(buffer), self._size - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


@frozen
class ImageDecoder:
    """Opens images as a source's keys say."""

    grey_range: GreyRange | None = None
    """Values that are black and white in greys of more than 8 bits; None: as declared by the file, if at all."""
    max_pixels: int = MAX_PIXELS
    """Images with more are refused by their header."""

    def size(self, file: ImageFile) -> tuple[int, int]:
        """Returns height and width of the upright image, from its header.

        Raises:
            BrokenImage: it has none that can be read, or a header that rules the image out.
        """
        with self._opened(file) as (image, stream):
            width, height = image.size
            return (width, height) if _orientation(image, stream) in ON_ITS_SIDE else (height, width)

    def decode(self, file: ImageFile, mode: Mode = "RGB") -> Image.Image:
        """Returns the upright image: transparent parts are white, 16 bits lose the lower 8.

        Raises:
            BrokenImage: it cannot be decoded to its end, or it is not known what its values mean.
        """
        with self._opened(file) as (image, _):
            pixels = self._converted(image, mode)
            # Asked for behind the pixels, where PNG may have it. Pillow turns TIFF itself, and drops the tag.
            turn = TURNS.get(image.getexif().get(ORIENTATION, 1))
        del image  # two copies of the pixels at most
        return pixels if turn is None else pixels.transpose(turn)

    def key(self) -> list[object]:
        """Returns all that images depend on; empty: nothing but the file."""
        changed = self.grey_range is not None or self.max_pixels != MAX_PIXELS
        return [self.grey_range, self.max_pixels] if changed else []

    @contextmanager
    def _opened(self, file: ImageFile) -> Iterator[tuple[Image.Image, BinaryIO]]:
        # Decoders raise whatever a damaged file leads them to: OSError, SyntaxError, struct.error, ValueError, …
        try:
            with file.open() as stream:
                try:
                    image = _open(stream)
                except UnidentifiedImageError as error:
                    raise ValueError(reason_unidentified(stream)) from error
                # Pillow has read the header alone by now: a small file may claim gigabytes of pixels
                self._check(image)
                yield image, stream
        except Exception as error:
            raise BrokenImage(f"image {file.name!r} cannot be read ({_reason(error)})") from error

    def _check(self, image: Image.Image) -> None:
        width, height = image.size
        if width * height > self.max_pixels:
            size = f"{height:,} x {width:,} = {width * height:,} pixels"
            raise ValueError(f"it has {size}, more than max_pixels = {self.max_pixels:,}; shrink it, or raise the key")
        if is_deep(image) and self.grey_range is None and (message := unknown_range(image)):
            raise ValueError(message)

    def _converted(self, image: Image.Image, mode: Mode) -> Image.Image:
        """Returns the pixels, not turned, and not copied unless they must be."""
        raw = _raw_mode(image)
        if is_deep(image):
            return _deep(image, self.grey_range).convert(mode)
        image.load()
        if image.mode == "P" and image.palette is None:
            raise ValueError(f"Pillow loses its palette in {image.format} files; convert it to PNG")
        if ";16" in raw:
            _check_colours_of_16_bits(image)
        if image.has_transparency_data:
            return _on_white(image, PALETTE_STEPS.get(raw, 1), mode)
        if image.mode == mode:
            return image
        direct = mode == "RGB" or image.mode in ("1", "P", "RGB")  # of others, Pillow converts only some to greys
        return image.convert(mode) if direct else image.convert("RGB").convert(mode)


def _open(stream: BinaryIO) -> Image.Image:
    """Opens an image of any size. Pillow's limit is a variable of its module, which others in the process may use."""
    # Without the lock, a second thread could save None as the limit, and restore that for good
    with _opening:
        limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            return Image.open(stream)
        finally:
            Image.MAX_IMAGE_PIXELS = limit


def _orientation(image: Image.Image, stream: BinaryIO) -> object:
    """Returns the orientation of an image that is not loaded."""
    if image.format == "TIFF":
        return 1  # Pillow's size is the upright image's
    if image.format == "PNG":
        # Pillow would decode every PNG without EXIF, to look for it behind the pixels.
        if _has_late_exif(stream):
            image.load()
        elif not _may_be_turned(image):
            return 1
    return image.getexif().get(ORIENTATION, 1)


def _may_be_turned(image: Image.Image) -> bool:
    """Whether something before the pixels of a PNG may have an orientation."""
    is_in_xmp = "tiff:Orientation" in str(image.info.get(XMP, ""))
    return is_in_xmp or "exif" in image.info or RAW_EXIF in image.info


def _has_late_exif(stream: BinaryIO) -> bool:
    """Whether a PNG has EXIF, or what may stand for it, behind its pixels. Chunks are passed over, not read."""
    place, is_behind = stream.tell(), False
    # 8: chunks begin behind the signature
    stream.seek(8)
    try:
        while len(header := stream.read(8)) == 8:
            size, kind = struct.unpack(">I4s", header)
            is_behind = is_behind or kind == b"IDAT"
            start = stream.read(min(size, 32)) if is_behind and kind in (b"tEXt", b"zTXt", b"iTXt") else b""
            if is_behind and (kind == b"eXIf" or start.startswith((XMP.encode(), RAW_EXIF.encode()))):
                return True
            # 4: the CRC that ends each chunk
            stream.seek(size + 4 - len(start), io.SEEK_CUR)
        return False
    finally:
        stream.seek(place)


def _raw_mode(image: Image.Image) -> str:
    """Returns how the file has the values of an image that is not loaded, such as `RGB;16B`."""
    args = image.tile[0].args if isinstance(image, PillowFile) and image.tile else ""
    return str(args[0] if isinstance(args, tuple) and args else args)


def _deep(image: Image.Image, grey_range: GreyRange | None) -> Image.Image:
    """Returns deep greys as `L`."""
    grey = Image.fromarray(levels(image, grey_range))
    if "transparency" in image.info:
        grey.paste(255, mask=Image.fromarray(np.asarray(image) == image.info["transparency"]))
    return grey


def _check_colours_of_16_bits(image: Image.Image) -> None:
    """Raise for what the upper 8 bits, which are all that Pillow keeps, do not show."""
    if image.mode == "RGB" and "transparency" in image.info:
        raise ValueError("it has a transparent colour of 16 bits, which Pillow cannot tell; convert it to 8 bits")
    # Of the upper 8 bits: with 12 bits in 16, none exceeds 15
    brightest = int(np.max(image.convert("RGB").getextrema()))
    if 0 < brightest < DARK >> 8:
        message = f"its colours have 16 bits, and it uses the lower {brightest.bit_length() + 8}"
        raise ValueError(f"{message}: it would be dark; convert it to 8 bits")


def _on_white(image: Image.Image, step: int, mode: Mode) -> Image.Image:
    """Returns an image with transparent parts on white."""
    if image.mode == "L":
        image.info["transparency"] *= step
    colours = image if image.mode in ("RGBA", "LA") else image.convert("RGBA")
    paper = Image.new("L" if colours.mode == "LA" else "RGB", colours.size, "white")
    paper.paste(colours.getchannel("L") if colours.mode == "LA" else colours, mask=colours.getchannel("A"))
    return paper if paper.mode == mode else paper.convert(mode)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    # ValueErrors are raised here with a complete message; other errors mean little without their type.
    return str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
