"""What an encoded image is to those that read it, and the error where it cannot be read."""

from __future__ import annotations

from typing import BinaryIO, Protocol


class ImageFile(Protocol):
    """An encoded image or video somewhere."""

    @property
    def name(self) -> str:
        """Its name, for errors."""

    def open(self) -> BinaryIO: ...


class BrokenImage(Exception):
    """An image that cannot be read; the message names it and says why."""
