"""Records by number: the content of a line of JSON, or of a group of files, with its images and videos."""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from forge_core.contracts.errors import JobError
from forge_plugin_images.decoding import BytesImage, FileImage, UrlImage
from forge_plugin_images.image_file import ImageFile


class Record(NamedTuple):
    """One entry of a source."""

    place: str
    """Where it is, for errors and held-out lists: `data/a.jsonl:17`."""
    file: str
    values: Mapping[str, Any]

    def value(self, key: str, setting: str) -> Any:
        """Returns the value of a key.

        Raises:
            JobError: there is none; the message names the `setting` that specifies the key.
        """
        if self.values.get(key) is None:
            keys = ", ".join(repr(name) for name in self.values if name) or "nothing"
            raise JobError(f"{self.place}: no key {key!r}, but {keys}; set `{setting}` to the key that it should be")
        return self.values[key]

    def text(self, key: str, setting: str) -> str:
        """Like `value`, for a text."""
        if isinstance(value := self.value(key, setting), str):
            return value
        raise JobError(f"{self.place}: {key!r} holds {str(value)[:60]!r}, which is not a text")


class ImageSource(Protocol):
    """Finds the encoded files of records: images, and videos just so."""

    def image(self, record: Record, value: Any) -> ImageFile:
        """Returns the file that a value refers to; raises `JobError` if it refers to none."""


@runtime_checkable
class Records(ImageSource, Protocol):
    """A source of records, which may be read in any order and in several processes."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int) -> Record:
        """Returns a record; raises `JobError` if it cannot be read."""

    def identity(self) -> str:
        """See `HasIdentity`."""


def embedded_image(record: Record, value: Any) -> ImageFile | str:
    """Returns the image that a value holds, or the name of the file that it refers to.

    Hugging Face's `{"bytes": …, "path": …}`, `data:` URLs, and OpenAI's `{"url": …}` are understood.
    """
    if isinstance(value, Mapping):
        # Bytes before the path, which with embedded bytes is often a bare name without a file
        if isinstance(data := value.get("bytes"), bytes):
            return BytesImage(f"{value.get('path') or 'file'} in {record.place}", data)
        value = value.get("url") or value.get("path")
    if isinstance(value, bytes):
        return BytesImage(f"file in {record.place}", value)
    if not isinstance(value, str) or not value:
        raise JobError(
            f"{record.place}: {str(value)[:60]!r} is no image or video; give the path of a file, or its bytes"
        )
    if value.startswith("data:"):
        return _of_data_url(record, value)
    if value.startswith(("http://", "https://")):
        hint = "download it first, since a run must not depend on other machines"
        raise JobError(f"{record.place}: {value[:80]!r} is on the network; {hint}")
    return value.removeprefix("file://")


def file_at(folder: str, name: str) -> ImageFile:
    """Returns the image that a table names: a file below `folder`, or a URL of fsspec (`hf://…`, `zip://a.png::b.zip`)."""
    return UrlImage(name) if "://" in name else FileImage(os.path.join(folder, name))


def _of_data_url(record: Record, url: str) -> BytesImage:
    header, _, data = url.partition(",")
    try:
        return BytesImage(f"{header} in {record.place}", base64.b64decode(data, validate=True))
    except binascii.Error as error:
        raise JobError(f"{record.place}: the file in {url[:40]!r}… is not base64 ({error})") from error


def stamps(files: Sequence[str]) -> list[list[int | str]]:
    """Returns name, size and time of change of each file."""
    stats = [os.stat(file) for file in files]
    pairs = zip(files, stats, strict=True)
    # Without folders: data that are moved as a whole keep their identity
    return [[os.path.basename(file), stat.st_size, stat.st_mtime_ns] for file, stat in pairs]
