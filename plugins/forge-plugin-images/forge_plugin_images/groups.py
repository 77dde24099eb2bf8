"""Files that belong together by their names: shards of webdataset, or a folder of images with texts beside them."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen

from forge_core.contracts.errors import JobError
from forge_kit.data.cache import cached_folder
from forge_kit.data.tar_groups import tar_groups
from forge_plugin_images.decoding import FileImage, SectionImage
from forge_plugin_images.image_file import ImageFile
from forge_plugin_images.json_lines import LINE, json_object, lines_of
from forge_plugin_images.records import Record, embedded_image
from forge_plugin_images.source_files import IMAGES, SOUNDS, VIDEOS, Found, files_of

FORMAT = 1
"""Part of the key: increase it when the same files are grouped differently."""

TEXTS, JSON = (".txt", ".text", ".caption"), ".json"
GROUPS = "groups.jsonl"

Member = tuple[str, int, int]
"""A file: its path, or the archive's path, with its first byte and its size; a size of -1 stands for a whole file."""
Group = tuple[str, Mapping[str, Member]]
"""Name of a group, and its files by what their names have after it, lower case."""


@frozen
class GroupedFiles:
    """Groups of files as records: the keys of the group's JSON, if any, and each file by its ending.

    `image` is the group's first image, `video` its first video, `sound` its first sound and `text` its text. Where its
    JSON has a key of the same name, the file counts.
    """

    index: Path
    """Folder of the cache with the groups, one per line, and the start of each line."""
    files_identity: str

    @classmethod
    def open(cls, found: Found, patterns: Sequence[str]) -> GroupedFiles:
        """Index the members of tar files, or group images and videos with the files beside them; both are cached.

        Args:
            found: the files.
            patterns: where loose files are, which are listed again unless the cache has their groups.
        """

        def groups() -> Iterator[Group]:
            if found.ending:
                # Lazy: nothing is listed or opened if the cache has the groups
                return (group for file in found.files for group in _of_archive(file))
            return _of_files(files_of(patterns)[1])

        stored = cached_folder("image-groups", found.key, lambda folder: _write_groups(folder, groups()))
        return cls(stored.path, found.identity)

    def __len__(self) -> int:
        return len(lines_of(self.index))

    def __getitem__(self, number: int) -> Record:
        _, start, length, _ = lines_of(self.index)[number].tolist()
        with open(self.index / GROUPS, "rb") as stream:
            stream.seek(start)
            name, members = json.loads(stream.read(length))
        file, _, size = next(iter(members.values()))
        place = name if size < 0 else f"{file}:{name}"
        return Record(place, file, dict(_values(place, members)))

    def image(self, record: Record, value: Any) -> ImageFile:
        """See `Records`. A text names a member by its ending (`jpg`), or by its whole name."""
        found = embedded_image(record, value)
        if not isinstance(found, str):
            return found
        members = record.values[MEMBERS]
        endings = [ending for ending in members if found == ending or found.endswith(f".{ending}")]
        if not endings:
            known = ", ".join(map(repr, members))
            raise JobError(f"{record.place}: {found!r} is no file of this group, whose files end in {known}")
        # The longest, as `seg.png` is no `png`
        ending = max(endings, key=len)
        path, start, size = members[ending]
        if size < 0:
            return FileImage(path)
        return SectionImage(f"{record.place}.{ending}", path, start, size)

    def identity(self) -> str:
        """See `Records`: by sizes and times of the files."""
        return self.files_identity


MEMBERS = ""
"""Key under which a record has its members; no file's ending is empty."""


def _values(place: str, members: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    # The JSON first, in whatever order the files come: of two values of a key the later one counts
    for ending, member in members.items():
        if f".{ending}".endswith(JSON):
            yield from json_object(_bytes(member), f"{place}.{ending}").items()
    yield MEMBERS, members
    for ending, member in members.items():
        if f".{ending}".endswith(TEXTS):
            text = _decoded(place, ending, _bytes(member))
            yield from ((key, text) for key in ("text", ending))
    for key, endings in (("image", IMAGES), ("video", VIDEOS), ("sound", SOUNDS)):
        own = [ending for ending in members if f".{ending}".endswith(endings)]
        # The value of a member is its ending, which `image` looks up among the members.
        yield from ((ending, ending) for ending in own)
        if own:
            yield key, own[0]


def _bytes(member: Member) -> bytes:
    path, start, size = member
    with open(path, "rb") as stream:
        stream.seek(start)
        return stream.read(size)


def _decoded(place: str, ending: str, data: bytes) -> str:
    try:
        return data.decode().strip()
    except UnicodeDecodeError as error:
        raise JobError(f"{place}.{ending}: byte {error.start} is not UTF-8 ({error.reason}); convert it") from error


def _write_groups(folder: Path, groups: Iterable[Group]) -> Mapping[str, Any]:
    lines, start = [], 0
    with open(folder / GROUPS, "wb") as stream:
        for number, group in enumerate(groups, 1):
            data = json.dumps(group).encode() + b"\n"
            stream.write(data)
            # File 0: all groups are in one file, and each names the file of its members.
            lines.append((0, start, len(data), number))
            start += len(data)
    np.save(folder / "lines.npy", np.array(lines, LINE))
    return {"groups": len(lines)}


def _of_archive(path: str) -> Iterator[Group]:
    """Yields the groups of a tar file, in the order of their first members."""
    try:
        groups = tar_groups(path, "images are compressed already, so tar them without gzip")
    except JobError as error:
        raise JobError(problem.below("path") for problem in error.problems) from error
    for name, members in groups.items():
        yield name, {ending: (path, section.start, section.size) for ending, section in members.items()}


def _of_files(files: Sequence[str]) -> Iterator[Group]:
    """Yields images, videos and sounds with the files of the same name, but for the ending."""
    groups: dict[str, dict[str, Member]] = defaultdict(dict)
    for path in files:
        # At the last dot: names of loose files may have others
        base, ending = os.path.splitext(path)
        groups[base][ending[1:].lower()] = (path, 0, -1)
    shown = {ending[1:] for ending in (*IMAGES, *VIDEOS, *SOUNDS)}
    # A text or a JSON without such a file, such as a readme, is no document
    yield from ((base, members) for base, members in groups.items() if set(members) & shown)
