"""Texts with images in them, in the ways in which data sets write them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from forge_core.contracts.errors import JobError
from forge_plugin_images.records import Record

MARK = "<image>"
"""Stands for the next of a record's images in a text."""
OWN_KEYS = ("image", "path", "url", "bytes")
"""Keys under which an entry of type `image` may have the image itself."""


class Picture(NamedTuple):
    """A value that refers to an image."""

    value: Any


class ListedImages:
    """The images that a record lists, for the places in its texts that name none themselves."""

    def __init__(self, record: Record, key: str) -> None:
        value = record.values.get(key)
        listed = value if isinstance(value, list) else [value]
        self._record, self._key = record, key
        self._values = [one for one in listed if one is not None]
        self._taken = 0

    def take(self) -> Picture:
        """Returns the next one; raises `JobError` if there is none."""
        if self._taken == len(self._values):
            message = f"its texts refer to more images than the {len(self._values)} of {self._key!r}"
            raise JobError(f"{self._record.place}: {message}; list them all there, or name each where it stands")
        self._taken += 1
        return Picture(self._values[self._taken - 1])

    def check_all_taken(self) -> None:
        """Raise `JobError` if some image stands nowhere."""
        if self._taken < len(self._values):
            message = f"{self._key!r} lists {len(self._values)} images, and its texts refer to {self._taken}"
            raise JobError(f"{self._record.place}: {message}; write {MARK} where each of them stands")


def pieces_of(record: Record, content: Any, listed: ListedImages) -> Iterator[str | Picture]:
    """Yields texts and images in order.

    Args:
        record: where `content` is from, for errors.
        content: a text with `<image>` for each image; or a list of texts, of `None` for an image, and of entries like
            `{"type": "text", "text": …}`, `{"type": "image", "image": …}` or `{"type": "image_url", …}`.
        listed: the images of places that name none.

    Raises:
        JobError: `content` is something else.
    """
    if isinstance(content, list):
        for item in content:
            yield from _entry(record, item, listed) if isinstance(item, Mapping) else pieces_of(record, item, listed)
    elif content is None:
        yield listed.take()
    elif isinstance(content, str):
        for number, text in enumerate(content.split(MARK)):
            if number:
                yield listed.take()
            if text:
                yield text
    else:
        raise JobError(f"{record.place}: {str(content)[:60]!r} is neither a text nor a list of texts and images")


def _entry(record: Record, entry: Mapping[str, Any], listed: ListedImages) -> Iterator[str | Picture]:
    type_ = entry.get("type")
    if type_ == "text" and isinstance(entry.get("text"), str):
        yield entry["text"]
    elif type_ == "image":
        own = [entry[key] for key in OWN_KEYS if entry.get(key) is not None]
        yield Picture(own[0]) if own else listed.take()
    elif type_ == "image_url" and entry.get("image_url"):
        yield Picture(entry["image_url"])
    else:
        known = "type 'text' with a text, 'image' or 'image_url'"
        raise JobError(f"{record.place}: {str(dict(entry))[:80]!r} is no part of a content; known are {known}")
