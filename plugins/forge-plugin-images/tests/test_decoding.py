"""Whatever Pillow writes is read upright and as bright as it is, or refused by name."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps, UnidentifiedImageError

from forge_plugin_images.decoding import BytesImage, ImageDecoder
from forge_plugin_images.greys import is_deep
from forge_plugin_images.image_file import BrokenImage
from forge_testing.refusals import naming

Image.init()
FORMATS = sorted({*Image.SAVE} & {*Image.OPEN})
SHALLOW = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")
DEEP = ("I", "I;16", "F")
WITH_EXIF = ("AVIF", "JPEG", "MPO", "PNG", "TIFF", "WEBP")
ORIENTATION = 0x0112


def image_of(mode: str) -> Image.Image:
    """7 x 5 pixels, each unlike its mirror image, with all degrees of transparency."""
    y, x = np.mgrid[:5, :7]
    levels = np.stack([30 * x, 50 * y, 8 * (x + 4 * y), 255 - 35 * x], -1).astype(np.uint8)
    if mode == "I;16":
        return Image.fromarray(levels[..., 0].astype(np.uint16) * 257)
    if mode in ("I", "F"):
        return Image.fromarray(levels[..., 0].astype(np.int32 if mode == "I" else np.float32) * 100)
    if mode == "P":
        return Image.fromarray(levels[..., :3]).quantize(9)
    return (
        Image.fromarray(levels)
        .convert("RGBA" if mode == "RGBA" else "LA" if mode in ("LA", "PA") else "RGB")
        .convert(mode)
    )


def written(image: Image.Image, format: str, **options) -> BytesImage | None:
    """None: Pillow cannot write it so, or not read it again."""
    data = io.BytesIO()
    try:
        image.save(data, format, **options)
        Image.open(data).load()
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, UnidentifiedImageError):
        return None
    return BytesImage("an image", data.getvalue())


def reference(file: BytesImage) -> np.ndarray:
    """(height, width, 3) float64: the image as Pillow turns it, on white."""
    image = ImageOps.exif_transpose(Image.open(file.open()))
    pixels = np.asarray(image.convert("RGBA" if image.has_transparency_data else "RGB"), np.float64)
    alpha = pixels[..., 3:] / 255 if pixels.shape[2] == 4 else 1.0
    return 255 - (255 - pixels[..., :3]) * alpha


def check(file: BytesImage) -> None:
    expected, decoder = reference(file), ImageDecoder()
    shown = decoder.decode(file)
    assert np.abs(np.asarray(shown, np.float64) - expected).max() <= 0.5 + 1e-9
    assert decoder.size(file) == expected.shape[:2]
    assert (np.asarray(decoder.decode(file, "L")) == np.asarray(shown.convert("L"))).all()


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_is_upright_and_on_white(format):
    orientations = range(1, 9) if format in WITH_EXIF else (1, 6)
    for mode in SHALLOW:
        files = [written(image_of(mode), format, exif=turned(orientation)) for orientation in orientations]
        for file in {file.data: file for file in files if file is not None}.values():  # one where EXIF is not written
            if not is_deep(Image.open(file.open())) and (format, mode) != ("ICNS", "P"):
                check(file)


@pytest.mark.parametrize("format", WITH_EXIF)
def test_formats_with_exif_are_turned(format):
    corners = set()
    for orientation in range(1, 9):
        shown = np.asarray(ImageDecoder().decode(written(image_of("RGB"), format, exif=turned(orientation))), np.int64)
        corners.add((shown.shape, shown[0, 0].tobytes(), shown[-1, 0].tobytes(), shown[0, -1].tobytes()))
    assert len(corners) == 8


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return exif


def test_a_palette_that_pillow_loses_is_refused_by_name():
    with pytest.raises(BrokenImage, match=naming("ICNS", "PNG", "palette")):
        ImageDecoder().decode(written(image_of("P"), "ICNS"))


@pytest.mark.parametrize("format", FORMATS)
def test_deep_greys_are_right_or_refused_by_name(format):
    levels = np.asarray(image_of("I;16")) >> 8
    for mode in DEEP:
        file = written(image_of(mode), format)
        kept = "" if file is None else Image.open(file.open()).mode
        if not kept.startswith(("I", "F")):
            continue  # it writes fewer bits, or nothing
        if kept == "I;16" or (kept == "I" and format == "PPM"):
            full = mode == "I;16"
            shown = np.asarray(ImageDecoder().decode(file, "L"))
            assert (shown == levels if full else shown <= 255).all()
        else:
            numbers = "floating point" if kept == "F" else "integers"
            for read in (ImageDecoder().size, ImageDecoder().decode):
                with pytest.raises(BrokenImage, match=naming(numbers, "grey_range", "8 bits")):
                    read(file)
        white = 25500 if mode != "I;16" else 65535
        assert (np.asarray(ImageDecoder((0, white)).decode(file))[..., 1] == levels).all()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("place", ["before", "behind", "xmp before", "xmp behind"])
def test_a_png_is_turned_wherever_its_orientation_stands(orientation, place):
    chunk = chunk_of(b"eXIf", turned(orientation).tobytes()[6:])
    if place.startswith("xmp"):
        chunk = chunk_of(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + f'<x tiff:Orientation="{orientation}"/>'.encode())
    plain = written(image_of("RGB"), "PNG").data
    at = plain.index(b"IEND" if place.endswith("behind") else b"IDAT") - 4
    check(BytesImage("a png", plain[:at] + chunk + plain[at:]))


def chunk_of(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(bits: int, colour: int, rows: list[bytes], *chunks: bytes) -> BytesImage:
    """A PNG of 4 pixels a row, each row as packed bytes."""
    header = chunk_of(b"IHDR", struct.pack(">2I5B", 4, len(rows), bits, colour, 0, 0, 0))
    pixels = chunk_of(b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows)))
    return BytesImage("a png", b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + pixels + chunk_of(b"IEND", b""))


@pytest.mark.parametrize(
    ("bits", "colour", "row", "transparent", "expected"),
    [
        (8, 2, bytes([9, 8, 7] * 2 + [1, 2, 3] * 2), [9, 8, 7], [255, 255, 1, 1]),
        (8, 0, bytes([0, 60, 60, 200]), [60], [0, 255, 255, 200]),
        (4, 0, bytes([0x05, 0x5F]), [5], [0, 255, 255, 255]),
        (4, 0, bytes([0x05, 0x6F]), [15], [0, 85, 102, 255]),
        (2, 0, bytes([0b00011011]), [1], [0, 255, 170, 255]),
        (1, 0, bytes([0b01010000]), [0], [255, 255, 255, 255]),
        (16, 0, struct.pack(">4H", 0, 5, 65535, 25600), [5], [0, 255, 255, 100]),
    ],
)
def test_a_transparent_colour_becomes_white(bits, colour, row, transparent, expected):
    file = png(bits, colour, [row], chunk_of(b"tRNS", struct.pack(f">{len(transparent)}H", *transparent)))
    assert np.asarray(ImageDecoder().decode(file))[0, :, 0].tolist() == expected


def test_what_16_bits_are_is_known_or_asked_for():
    full = Image.fromarray(np.arange(16, dtype=np.uint16).reshape(4, 4) * 4096)
    assert (
        np.asarray(ImageDecoder().decode(written(full, "PNG")))[..., 0].tolist()
        == np.arange(0, 256, 16).reshape(4, 4).tolist()
    )
    twelve = written(Image.fromarray(np.arange(16, dtype=np.uint16).reshape(4, 4) * 273), "TIFF")
    with pytest.raises(BrokenImage, match=naming("16 bits", 12, "grey_range = [0, 4095]")):
        ImageDecoder().decode(twelve)
    for decoder, factor in ((ImageDecoder((0, 4095)), 17), (ImageDecoder((0, 65535)), 273 / 257)):
        assert np.abs(np.asarray(decoder.decode(twelve, "L")) - np.arange(16).reshape(4, 4) * factor).max() <= 0.5
    assert not np.asarray(ImageDecoder().decode(written(Image.new("I;16", (4, 4)), "TIFF"))).any()  # black is black


def test_a_tiff_whose_zero_is_white_and_one_without_sign_are_read_as_they_are():
    white = written(image_of("I;16"), "TIFF", tiffinfo={262: 0})
    assert (np.asarray(ImageDecoder().decode(white, "L")) == 255 - (np.asarray(image_of("I;16")) >> 8)).all()
    signed = written(Image.fromarray(np.array([[0, -1, 2**31 - 1]], np.int32)), "TIFF").data
    entry = struct.Struct("<HHIHH")
    large = BytesImage("a tiff", signed.replace(entry.pack(339, 3, 1, 2, 0), entry.pack(339, 3, 1, 1, 0)))
    assert np.asarray(ImageDecoder((0, 2**32 - 1)).decode(large, "L")).tolist() == [[0, 255, 127]]


def test_colours_of_16_bits_that_would_be_dark_or_transparent_are_refused():
    row = struct.pack(">12H", *range(0, 4092, 341))
    with pytest.raises(BrokenImage, match=naming("colours", "16 bits", 12)):
        ImageDecoder().decode(png(16, 2, [row]))
    with pytest.raises(BrokenImage, match=naming("transparent", "16 bits")):
        ImageDecoder().decode(png(16, 2, [row], chunk_of(b"tRNS", struct.pack(">3H", 0, 341, 682))))


def test_greys_that_are_not_finite_are_refused():
    file = written(Image.fromarray(np.array([[0, np.nan]], np.float32)), "TIFF")
    with pytest.raises(BrokenImage, match=naming("greys", "finite")):
        ImageDecoder((0, 1)).decode(file)


def test_max_pixels_alone_bounds_an_image(recwarn, monkeypatch):
    file = written(image_of("RGB"), "PNG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    assert ImageDecoder(max_pixels=35).decode(file).size == (7, 5)
    assert not recwarn.list
    with pytest.raises(BrokenImage, match=naming("5 x 7 = 35", "max_pixels = 34")):
        ImageDecoder(max_pixels=34).size(file)
    assert Image.MAX_IMAGE_PIXELS == 10


@pytest.mark.parametrize(
    ("start", "facts"),
    [
        (b"", ["empty"]),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", ["HEIC", "JPEG"]),
        (b'<?xml version="1.0"?>\n<svg xmlns="x">', ["SVG"]),
        (b"\n<!DOCTYPE html><html>", ["HTML"]),
        (b"\0\0\0\x18ftypisom\0\0\0\0", ["MP4"]),
        (b"not an image", ["text", "b'not an image'"]),
    ],
)
def test_what_is_no_image_is_named(start, facts):
    with pytest.raises(BrokenImage, match=naming("image 'x'", *facts)):
        ImageDecoder().size(BytesImage("x", start))
