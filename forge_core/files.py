"""Files that other processes read while they are written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

BLOCK = 1 << 18
"""Bytes that `lines_from_end` reads at a time."""


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file aside and rename it, so that `path` is the old file or the new one, and never a part of one.

    Its folder must exist. Several processes may write the same file: the last rename counts. What a killed process
    leaves beside it is named `.{name}.{process}.unfinished`.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        with unfinished.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())  # else a crash of the machine may leave the new name with no content
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def existing_part(path: Path) -> Path:
    """A path, or else the innermost folder above it that exists: whose disk and permissions it will have."""
    return next(each for each in (path, *path.parents) if os.path.exists(each))


def lines_from_end(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with the places where they begin, the last first; reads no more than is iterated over.

    The first one that this yields is what follows the last line break: nothing, or a line that is not complete.
    """
    left, rest = file.seek(0, os.SEEK_END), b""
    place = left
    while left:
        start = max(0, left - BLOCK)
        file.seek(start)
        rest, *lines = (file.read(left - start) + rest).split(b"\n")
        for line in reversed(lines):
            place -= len(line)
            yield place, line
            place -= 1  # the line break before it
        left = start
    yield 0, rest
