"""Reads Zstandard files to their end: all frames, and an error if the last is truncated.

`zstandard`'s own stream readers end without an error where a truncated file ends.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any, BinaryIO

import zstandard

CHUNK = 1 << 20
LARGEST_WINDOW = 1 << 31
"""Largest window of a frame, in bytes: the one of `zstd --long=31`."""


def open_zstd(path: str) -> BinaryIO:
    """Open `path` for its decompressed bytes, to be read in order.

    Reading raises EOFError where data is damaged or ends within a frame.
    """
    return io.BufferedReader(_ZstdFile(open(path, "rb")), CHUNK)


class _ZstdFile(io.RawIOBase):
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._chunks = _decompressed(file)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._rest:
            # Nothing left means the end of the file to `BufferedReader`, so pieces are never empty
            self._rest = memoryview(next(self._chunks, b""))
        taken, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
        buffer[: len(taken)] = taken
        return len(taken)

    def close(self) -> None:
        self._file.close()
        super().close()


def _decompressed(file: BinaryIO) -> Iterator[bytes]:
    """Yields non-empty pieces of the decompressed data."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW)
    frame = None
    while data := file.read(CHUNK):
        while data:
            frame = frame or decompressor.decompressobj()
            try:
                piece = frame.decompress(data)
            except zstandard.ZstdError as error:
                raise EOFError(str(error)) from error
            # What follows a frame begins the next one: tools write several into one file.
            data = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
            if piece:
                yield piece
    if frame is not None:
        raise EOFError("the last frame is cut short")
