"""Reading ids from files at any place.

Files are read, not mapped: the pages of a map that a run has touched count as its memory until they are needed
elsewhere, so that its size would grow with the corpus; and reading a map whose file was cut short ends the process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from forge_core.contracts.errors import DataError

OPEN_FILES = 128
"""Files that a reader keeps open at a time."""


class Reader:
    """Reads files, and keeps those open that were read last. May be used by several threads."""

    def __init__(self, sizes: Mapping[str, int] | None = None) -> None:
        """`sizes`: bytes that files have at least, by path, as another machine may have seen them."""
        self._sizes = sizes or {}
        # A cache for this reader: one on the method would be shared by all readers, and keep them alive
        self._opened = lru_cache(OPEN_FILES)(self._open)

    def read(self, path: str, dtype: np.dtype, offset: int, count: int) -> np.ndarray:
        """(count,) numbers of a file, from byte `offset` on; read-only.

        Raises:
            DataError: the file is gone, or ends before.
        """
        # By `pread` below: threads share the descriptor, and a `seek` of one would move the others.
        size = count * dtype.itemsize
        try:
            data = os.pread(self._opened(path).number, size, offset)
            while len(data) < size:  # at most 2 GiB come at a time
                data += self._more(path, offset + len(data), size - len(data))
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from error
        return np.frombuffer(data, dtype, count)

    def _open(self, path: str) -> _Descriptor:
        descriptor = _Descriptor(path)
        size = os.fstat(descriptor.number).st_size
        if size < self._sizes.get(path, 0):
            message = f"{path} has {size} bytes, and had {self._sizes[path]} when the run began"
            raise DataError(f"{message}: it was cut short, or is another file on this machine")
        return descriptor

    def _more(self, path: str, offset: int, size: int) -> bytes:
        data = os.pread(self._opened(path).number, size, offset)
        if not data:
            raise DataError(f"{path} ends at byte {offset}, before {offset + size}: it was cut short")
        return data


class _Descriptor:
    """An open file. It is closed with its last reference, which a thread that is reading holds too."""

    def __init__(self, path: str) -> None:
        # So that `__del__` finds it where `open` raises
        self.number = -1
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)
