"""Lines of a file that grows, and is replaced when its run continues."""

from __future__ import annotations

import os
from pathlib import Path

WINDOW = 64_000_000
"""Bytes of a file that are read from its end: hours of steps of the largest models, months of small ones."""


class FollowedFile:
    """A file that another process writes. A line is returned when it is whole.

    A run that continues cuts the file behind the line of its checkpoint.
    """

    def __init__(self, path: Path, window: int = WINDOW) -> None:
        self.path, self._window = path, window
        self._descriptor: int | None = None
        self._at = 0
        self._rest = b""

    def lines(self) -> list[bytes]:
        """Returns the lines since the last call; all, from the start, after the file was replaced or cut."""
        if self._is_another():
            self.close()
        if self._descriptor is None and not self._open():
            return []
        assert self._descriptor is not None
        parts = [self._rest]
        # In pieces of 1 MiB, as the first call may read the whole window
        while part := os.pread(self._descriptor, 1 << 20, self._at):
            self._at += len(part)
            parts.append(part)
        *lines, self._rest = b"".join(parts).split(b"\n")
        return lines

    def close(self) -> None:
        """Close it; the next call of `lines` opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor, self._rest = None, b""

    def _open(self) -> bool:
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        # Its first line may then be half a line, which nobody can read, as one of a run that was killed
        self._at = max(0, os.fstat(self._descriptor).st_size - self._window)
        return True

    def _is_another(self) -> bool:
        if self._descriptor is None:
            return False
        own = os.fstat(self._descriptor)
        if own.st_size < self._at:  # it was cut, or written again
            return True
        try:
            named = os.stat(self.path)
        except FileNotFoundError:
            return False  # between the old and the new one
        return (named.st_dev, named.st_ino) != (own.st_dev, own.st_ino)
