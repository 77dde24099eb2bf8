"""Files of JSON lines, and where each line starts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen

from forge_core.contracts.errors import JobError
from forge_kit.data.cache import cached_folder
from forge_plugin_images.decoding import FileImage
from forge_plugin_images.image_file import ImageFile
from forge_plugin_images.records import Record, embedded_image
from forge_plugin_images.source_files import Found

FORMAT = 1
"""Part of the key: increase it when the same files are indexed differently."""


@frozen
class JsonLines:
    """Files of JSON lines. A pickled copy reads the index of lines by itself."""

    files: Sequence[str]
    index: Path
    """Folder of the cache with the start of each line."""
    files_identity: str
    folder: str = ""
    """Where relative paths of images start; empty: beside the file."""

    @classmethod
    def open(cls, found: Found, folder: str = "") -> JsonLines:
        """Index the lines of files, or take the index from the cache."""
        stored = cached_folder("image-lines", found.key, lambda path: _index_lines(path, found.files))
        return cls(found.files, stored.path, found.identity, folder)

    def __len__(self) -> int:
        return len(lines_of(self.index))

    def __getitem__(self, number: int) -> Record:
        file, start, length, line = lines_of(self.index)[number].tolist()
        path = self.files[file]
        with open(path, "rb") as stream:
            stream.seek(start)
            data = stream.read(length)
        return Record(f"{path}:{line}", path, json_object(data, f"{path}:{line}"))

    def image(self, record: Record, value: Any) -> ImageFile:
        """See `Records`."""
        found = embedded_image(record, value)
        if not isinstance(found, str):
            return found
        return FileImage(os.path.join(self.folder or os.path.dirname(record.file), found))

    def identity(self) -> str:
        """See `Records`: by sizes and times of the files of lines; images are not looked at."""
        return self.files_identity


LINE = np.dtype([("file", "i4"), ("start", "i8"), ("length", "i4"), ("line", "i8")])
_opened: dict[Path, np.ndarray] = {}
"""Indexes of lines that this process has mapped."""


def lines_of(index: Path) -> np.ndarray:
    """Returns the (lines,) entries `LINE` in a folder of the cache, mapped."""
    if index not in _opened:
        # Mapped, so that worker processes share its pages
        _opened[index] = np.load(index / "lines.npy", mmap_mode="r")
    return _opened[index]


def _index_lines(folder: Path, files: Sequence[str]) -> Mapping[str, Any]:
    lines = np.array([line for file in range(len(files)) for line in _lines(files, file)], LINE)
    np.save(folder / "lines.npy", lines)
    return {"lines": len(lines)}


def _lines(files: Sequence[str], file: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields entries of the index for the lines of a file that are not blank."""
    start = 0
    # Opened as bytes, since `seek` needs offsets in bytes
    with open(files[file], "rb") as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield file, start, len(line), number
            start += len(line)


def json_object(data: bytes, place: str) -> Mapping[str, Any]:
    """Returns the object that `data` is; `place` is where it stands, for errors."""
    try:
        record = json.loads(data)
    except ValueError as error:
        raise JobError(f"{place}: not JSON ({error}); one object is expected") from error
    if not isinstance(record, dict):
        raise JobError(f"{place}: {str(record)[:60]!r} is not an object")
    return record
