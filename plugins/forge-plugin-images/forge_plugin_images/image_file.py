"""What an encoded image is to its readers, its limits, and the error where it cannot be read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO, Protocol

from forge_core.contracts.errors import Problem

if TYPE_CHECKING:
    from forge_plugin_vision import ImageFormat

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


def channel_problems(form: ImageFormat) -> Iterator[Problem]:
    """Yields the problem of an encoder whose channels no image of a file has."""
    if form.channels not in (1, 3):
        message = f"the encoder takes images of {form.channels} channels, and data have 3 (colours) or 1 (grey)"
        yield Problem("", f"{message}; take another encoder, or a dataset that makes such patches")
