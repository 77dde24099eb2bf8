"""What an encoded image is to its readers, its limits, and the error where it cannot be read."""

from __future__ import annotations

from typing import BinaryIO, Protocol

MAX_PIXELS = 180_000_000
"""Pixels of the largest image that is decoded, unless a key sets another limit."""
GreyRange = tuple[float, float]
"""The values that are black and white."""


class ImageFile(Protocol):
    """An encoded image or video somewhere."""

    @property
    def name(self) -> str:
        """Its name, for errors."""

    def open(self) -> BinaryIO: ...


class BrokenImage(Exception):
    """An image that cannot be read; the message names it and gives the reason."""
