"""Input files, decompressed while they are read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from forge_core.contracts.errors import JobError

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


class Stream:
    """The bytes of a file, to be read in order."""

    def __init__(self, raw: Any, bytes_: Any) -> None:
        self._raw, self._bytes = raw, bytes_

    def read(self, size: int) -> bytes:
        """At most `size` bytes; none at the end."""
        data: bytes = self._bytes.read(size)
        return data

    def skip(self, size: int) -> None:
        """Pass over `size` bytes."""
        if self._bytes is self._raw:
            self._raw.seek(size, os.SEEK_CUR)
            return
        while size and (data := self.read(min(size, 1 << 20))):
            size -= len(data)

    def passed(self) -> int:
        """Bytes of the file that have been read, as they lie on disk."""
        return int(self._raw.tell())


@contextmanager
def opened(path: str) -> Iterator[Stream]:
    """Open an input.

    Raises:
        JobError: it cannot be read, or its compressed data is damaged.
    """
    compression = COMPRESSIONS.get(os.path.splitext(path)[1])
    with _named(path, compression), open(path, "rb") as raw:
        yield Stream(raw, _decompressed(raw, compression) if compression else raw)


@contextmanager
def _named(path: str, compression: str | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno is None and compression:  # of pyarrow, about what it decompresses
            raise JobError(f"{path}: damaged {compression} data ({error}); make the file again") from error
        raise JobError(f"{path}: cannot be read ({error.strerror or error})") from error


def _decompressed(raw: BinaryIO, compression: str) -> Any:
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), compression)
