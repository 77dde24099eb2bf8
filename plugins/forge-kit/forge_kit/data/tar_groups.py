"""Files of tar archives that belong together by their names, as in shards of webdataset."""

from __future__ import annotations

import os
import tarfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from forge_core.contracts.errors import JobError

BLOCK = 512
TEXTS, TABLE = ("txt", "text"), "json"
"""Endings of a text, and of what is known of it, or of a table that has the text itself."""


class Section(NamedTuple):
    """A file within an archive."""

    start: int
    """Its first byte in the archive."""
    size: int


class TextGroup(NamedTuple):
    """A document of an archive of texts."""

    name: str
    """What the names of its files begin with."""
    text: bytes | None
    """Content of its text file; None: it has none."""
    table: bytes | None
    """Content of its JSON; None: it has none."""


def tar_groups(path: str, advice: str = "make it again") -> Mapping[str, Mapping[str, Section]]:
    """Returns the groups of an archive, in the order of their first files: the files of each by their endings.

    Headers are read, and no file. Files of a group need not follow each other. Names are divided at the first dot, as
    webdataset does: `a.seg.png` is `seg.png` of the group `a`; endings are in lower case.

    Args:
        path: of the archive, which is not compressed.
        advice: the end of the message of an error.

    Raises:
        JobError: it is no such archive, or was cut short.
    """
    groups: dict[str, dict[str, Section]] = defaultdict(dict)
    try:
        # `r:` refuses compression: files are read later by their offsets
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                folder, _, name = member.name.rpartition("/")
                base, dot, ending = name.partition(".")
                if member.isfile() and dot and base:
                    group = f"{folder}/{base}" if folder else base
                    groups[group][ending.lower()] = Section(member.offset_data, member.size)
            end = archive.offset
    except (tarfile.ReadError, OSError) as error:
        raise JobError(f"{path!r} cannot be read as tar ({error}); {advice}") from error
    # Every writer puts two blocks of zeros at the end; tarfile takes an archive that was cut between files for whole
    if os.path.getsize(path) < end + BLOCK:
        raise JobError(f"{path!r} has no end, as a tar that was cut short; {advice}")
    return groups


def text_groups(path: str, first: int = 0) -> Iterator[tuple[int, TextGroup]]:
    """Yields the documents of an archive of texts, from number `first` on, each with the byte at which it begins.

    Raises:
        JobError: see `tar_groups`.
    """
    groups = list(tar_groups(path).items())[first:]
    with open(path, "rb") as file:

        def content(section: Section | None) -> bytes | None:
            if section is None:
                return None
            file.seek(section.start)
            return file.read(section.size)

        for name, members in groups:
            text = next((members[ending] for ending in TEXTS if ending in members), None)
            begin = min(section.start for section in members.values())
            yield begin, TextGroup(name, content(text), content(members.get(TABLE)))
