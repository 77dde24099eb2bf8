"""Reading ids from files at any place.

Files are read, not mapped: the pages of a map that a run has touched count as its memory until they are needed
elsewhere, so that its size would grow with the corpus; and reading a map whose file was cut short ends the process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial

import numpy as np

from forge_core.contracts.errors import DataError
from forge_plugin_memmap.block_cache import block_cache
from forge_plugin_memmap.remote import is_remote, read_range

OPEN_FILES = 128
"""Files that a reader keeps open at a time."""


class Reader:
    """Reads files, and keeps those open that were read last. May be used by several threads."""

    def __init__(self, stamps: Mapping[str, Sequence[int]] | None = None, cache_bytes: int = 0) -> None:
        """Make a reader.

        Args:
            stamps: of files, by path, as another machine may have seen them: they have at least these sizes.
            cache_bytes: size of the cache of blocks of remote files with stamps; 0: they are not cached.
        """
        self._stamps, self._cache_bytes = stamps or {}, cache_bytes
        # A cache for this reader: one on the method would be shared by all readers, and keep them alive
        self._opened = lru_cache(OPEN_FILES)(self._open)

    def read(self, path: str, dtype: np.dtype, offset: int, count: int) -> np.ndarray:
        """(count,) numbers of a file, from byte `offset` on; read-only.

        Raises:
            DataError: the file is gone, or ends before.
        """
        # By `pread` below: threads share the descriptor, and a `seek` of one would move the others.
        size = count * dtype.itemsize
        if is_remote(path):
            return np.frombuffer(self._read_remote(path, offset, size), dtype, count)
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
        expected = self._stamps[path][0] if path in self._stamps else 0
        if size < expected:
            message = f"{path} has {size} bytes, and had {expected} when the run began"
            raise DataError(f"{message}: it was cut short, or is another file on this machine")
        return descriptor

    def _read_remote(self, path: str, offset: int, size: int) -> bytes:
        try:
            # Sums of blocks and indexes have no stamp: they are read once, and small
            is_cached = self._cache_bytes and path in self._stamps
            data = self._cached(path, offset, size) if is_cached else read_range(path, offset, offset + size)
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
        if len(data) < size:
            raise DataError(f"{path} ends at byte {offset + len(data)}, before {offset + size}: it was cut short")
        return data

    def _cached(self, path: str, offset: int, size: int) -> bytes:
        """Bytes of a remote file, by the blocks that they lie in."""
        total, version, *_ = self._stamps[path]
        cache = block_cache(self._cache_bytes)
        parts = []
        for number in range(offset // cache.block, -(-(offset + size) // cache.block)):
            first = number * cache.block
            stop = min(first + cache.block, total)
            # The version is part of its name: a file that was written again has other blocks
            part = slice(max(offset - first, 0), max(min(offset + size, stop) - first, 0))
            name, fetch = f"{path} {version}", partial(read_range, path, first, stop)
            parts.append(cache.read(name, number, stop - first, part, fetch))
        return b"".join(parts)

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
