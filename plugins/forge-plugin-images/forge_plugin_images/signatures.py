"""What a file is that Pillow does not read as an image."""

from __future__ import annotations

from typing import BinaryIO

HEIC = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
"""Brands of HEIF files, which iPhones write."""


def reason_unidentified(stream: BinaryIO) -> str:
    """Returns why a file is no image that can be read, and what helps, by its first bytes."""
    stream.seek(0)
    # Enough for the declarations and comments that may precede `<svg`
    start = stream.read(1024)
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if not start:
        return "the file is empty"
    if start[4:8] == b"ftyp":
        # The major brand, by which HEIC, AVIF and MP4 differ (ISO/IEC 14496-12, 4.3)
        return _of_boxes(start[8:12])
    if start.startswith((b"\xff\x0a", b"\0\0\0\x0cJXL ")):
        return "it is JPEG XL, which Pillow does not read; convert it to PNG"
    if b"<svg" in text and text.startswith(b"<"):
        return "it is SVG, which has no pixels; render it to PNG"
    if text.startswith((b"<!doctype html", b"<html")):
        return "it is a page of HTML, as failed downloads are; fetch the image again"
    if start.startswith(b"%PDF"):
        return "it is PDF; render its pages to PNG"
    if start.startswith((b"\x1aE\xdf\xa3", b"RIFF")):
        return "it is a video or a sound; name it by a key for videos"
    kind = "its format is unknown" if b"\0" in start else "it is text"
    return f"{kind}; it begins with {start[:12]!r}"


def _of_boxes(brand: bytes) -> str:
    if brand in HEIC:
        return "it is HEIC, which Pillow does not read; convert it to JPEG, PNG or AVIF"
    if brand in (b"avif", b"avis"):
        return "it is AVIF, which this Pillow does not read; take a newer one, or convert it to PNG"
    return "it is an MP4 or QuickTime video; name it by a key for videos"
