"""Texts with images and videos in them, in the ways in which data sets write them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from attrs import define, field

from forge_core.contracts.errors import JobError
from forge_plugin_images.records import Record
from forge_plugin_images.video_kind import NO_TABLE

if TYPE_CHECKING:
    from forge_plugin_images.visuals import Visual, VisualSource

Kind = Literal["image", "video"]
MARK = "<image>"
"""Stands for the next of a record's images in a text."""
MARKS: Mapping[str, Kind] = {MARK: "image", "<video>": "video"}
OWN_KEYS: Mapping[Kind, tuple[str, ...]] = {
    "image": ("image", "path", "url", "bytes"),
    "video": ("video", "path", "url", "bytes"),
}
"""Keys under which an entry of a type may have the image or video itself."""


class Shown(NamedTuple):
    """A value that refers to an image or a video."""

    value: Any
    kind: Kind = "image"

    def visual(self, record: Record, visuals: VisualSource) -> Visual:
        """Returns what it refers to."""
        return (visuals.image if self.kind == "image" else visuals.video)(record, self.value)


@define
class _List:
    """Images, or videos, that a record lists."""

    key: str
    values: list[Any]
    taken: int = field(default=0)


class Listed:
    """The images and videos that a record lists, for the places in its texts that name none themselves."""

    def __init__(self, record: Record, images: str, videos: str, *, has_videos: bool) -> None:
        """Args: `images` and `videos`, keys of the record; `has_videos`, whether the source can show these.

        Raises:
            JobError: the record lists videos, and the source cannot show them.
        """
        self._record, self._has_videos = record, has_videos
        self._lists: dict[Kind, _List] = {"image": _listed(record, images), "video": _listed(record, videos)}
        if not has_videos and self._lists["video"].values:
            raise JobError(f"{record.place}: {NO_TABLE}")
        # `<video>` is a tag of HTML: without videos it is text.
        marks = MARKS if has_videos else (MARK,)
        self.marks = re.compile("|".join(map(re.escape, marks)))

    def take(self, kind: Kind) -> Shown:
        """Returns the next one; raises `JobError` if there is none."""
        # Only an entry of type `video` comes here: without the table, `<video>` in a text is no mark
        if kind == "video" and not self._has_videos:
            raise JobError(f"{self._record.place}: {NO_TABLE}")
        own = self._lists[kind]
        if own.taken == len(own.values):
            message = f"its texts refer to more {kind}s than the {len(own.values)} of {own.key!r}"
            raise JobError(f"{self._record.place}: {message}; list them all there, or name each where it stands")
        own.taken += 1
        return Shown(own.values[own.taken - 1], kind)

    def check_all_taken(self) -> None:
        """Raise `JobError` if some image or video stands nowhere."""
        for kind, own in self._lists.items():
            if own.taken < len(own.values):
                message = f"{own.key!r} lists {len(own.values)} {kind}s, and its texts refer to {own.taken}"
                raise JobError(f"{self._record.place}: {message}; write <{kind}> where each of them stands")


def _listed(record: Record, key: str) -> _List:
    value = record.values.get(key)
    # A record with one image may hold it without a list. None is an absent one, as in Arrow tables.
    values = value if isinstance(value, list) else [value]
    return _List(key, [one for one in values if one is not None])


def pieces_of(record: Record, content: Any, listed: Listed) -> Iterator[str | Shown]:
    """Yields texts, images and videos in order.

    Args:
        record: where `content` is from, for errors.
        content: a text with `<image>` for each image and `<video>` for each video; or a list of texts, of `None` for an
            image, and of entries like `{"type": "text", "text": …}`, `{"type": "image", "image": …}`,
            `{"type": "image_url", …}` or `{"type": "video", "video": …, "start": …, "end": …}`.
        listed: the images and videos of places that name none.

    Raises:
        JobError: `content` is something else.
    """
    if isinstance(content, list):
        for item in content:
            # Recursive, since a text in a list may have marks in it, and None stands for an image
            yield from _entry(record, item, listed) if isinstance(item, Mapping) else pieces_of(record, item, listed)
    elif content is None:
        yield listed.take("image")
    elif isinstance(content, str):
        end = 0
        for mark in listed.marks.finditer(content):
            yield from [content[end : mark.start()]] if mark.start() > end else []
            yield listed.take(MARKS[mark.group()])
            end = mark.end()
        yield from [content[end:]] if end < len(content) else []
    else:
        raise JobError(f"{record.place}: {str(content)[:60]!r} is neither a text nor a list of texts and images")


def _entry(record: Record, entry: Mapping[str, Any], listed: Listed) -> Iterator[str | Shown]:
    type_ = entry.get("type")
    if type_ == "text" and isinstance(entry.get("text"), str):
        yield entry["text"]
    elif type_ == "image":
        # An entry without the image itself, as in messages for chat templates, takes the next one listed.
        own = [entry[key] for key in OWN_KEYS["image"] if entry.get(key) is not None]
        yield Shown(own[0]) if own else listed.take("image")
    elif type_ == "image_url" and entry.get("image_url"):
        yield Shown(entry["image_url"])
    elif type_ == "video":
        own = [entry[key] for key in OWN_KEYS["video"] if entry.get(key) is not None]
        yield Shown(_part(own[0] if own else listed.take("video").value, entry), "video")
    else:
        known = "type 'text' with a text, 'image', 'image_url' or 'video'"
        raise JobError(f"{record.place}: {str(dict(entry))[:80]!r} is no part of a content; known are {known}")


def _part(value: Any, entry: Mapping[str, Any]) -> Any:
    """Returns the value of a video, with the times that its entry names."""
    times = {key: entry[key] for key in ("start", "end") if entry.get(key) is not None}
    # The form from which `VisualSource.video` reads times
    return {"video": value, **times} if times else value
