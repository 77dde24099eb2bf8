"""Files read once, from start to end: hashed on the way, and handed over in pieces.

Hashing and writing each keep a core busy, so files are read several at a time, and a piece is hashed by one thread
while another uses it. Memory is needed for one piece a thread, whatever the size of a file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import Any

from attrs import frozen

from forge_core.checkpoint.storage import threads
from forge_core.contracts.errors import CheckpointError
from forge_core.launch.progress_beacon import report_progress
from forge_plugin_weights.files import read_into

BLOCK = 1 << 20
"""Bytes of a piece that nobody asked for: they stay in the processor's cache between reading and hashing."""


@frozen
class Piece:
    """A range of a file's bytes."""

    start: int
    size: int
    key: Any = None
    """Of whoever wants it; None for what lies between."""


Sink = Callable[[Piece, memoryview], None]
"""Is called with each piece, in order; its memory is used again afterwards."""


@frozen(kw_only=True)
class Digest:
    """The entry of a file in a manifest."""

    size: int
    sha256: str
    """Empty if it was not asked for."""

    @property
    def entry(self) -> dict[str, Any]:
        """For the manifest."""
        return {"size": self.size, "sha256": self.sha256}


class Reader:
    """Reads files in its own threads. A context manager, which stops unfinished reads if it is left early."""

    def __init__(self) -> None:
        # Two pools: the thread of a file waits for the hashing of its pieces. In one pool, all threads could be
        # waiting.
        self._files, self._hashing = ThreadPoolExecutor(threads()), ThreadPoolExecutor(threads())
        self._ended = Event()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: object, _traceback: TracebackType | None) -> None:
        if kind is not None:
            self._ended.set()
        # In this order, as reads that still run hand pieces to the other pool
        self._files.shutdown(cancel_futures=kind is not None)
        self._hashing.shutdown()

    def submit(
        self, path: Path, pieces: Iterable[Piece] = (), sink: Sink | None = None, *, hashed: bool = True
    ) -> Future[Digest]:
        """Read a file.

        Args:
            path: of the file.
            pieces: in the order of their first bytes; what lies between them is read too if it is hashed.
            sink: is called with every piece that is read.
            hashed: whether to compute the SHA-256 of the whole file.

        Returns:
            Its size and SHA-256, later. Raises a `CheckpointError` if the file ends within a piece.
        """
        return self._files.submit(self._read, path, pieces, sink, hashed)

    def _read(self, path: Path, pieces: Iterable[Piece], sink: Sink | None, hashed: bool) -> Digest:
        digest, done, room = hashlib.sha256(), 0, memoryview(bytearray(BLOCK))
        with path.open("rb", buffering=0) as file:  # `read_into` fills our own memory
            size = os.fstat(file.fileno()).st_size
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)  # the kernel reads further ahead
            for piece in _with_gaps(pieces, size) if hashed else pieces:
                if self._ended.is_set():  # between pieces, as a file may take minutes
                    raise CancelledError
                if piece.size > len(room):  # kept for pieces to come
                    room = memoryview(bytearray(piece.size))
                memory = room[: piece.size]
                file.seek(piece.start)  # pieces may overlap, or leave gaps where nothing is hashed
                if not read_into(file, memory):
                    raise CheckpointError(f"{path} ends within a tensor; it is truncated")
                report_progress("reading")  # or a watchdog would take a large file for a hang
                new = memory[max(0, done - piece.start) :]  # pieces may overlap
                done = max(done, piece.start + piece.size)
                if sink is None:
                    digest.update(new)
                    continue
                hashing = self._hashing.submit(digest.update, new if hashed else b"")
                try:
                    sink(piece, memory)
                finally:
                    hashing.result()  # before the next piece is read into the same memory
        return Digest(size=size, sha256=digest.hexdigest() if hashed else "")


def _with_gaps(pieces: Iterable[Piece], size: int) -> Iterator[Piece]:
    """Yields pieces, and what lies before, between and behind them."""
    end = 0
    for piece in pieces:
        yield from _gap(end, piece.start)
        yield piece
        end = max(end, piece.start + piece.size)
    yield from _gap(end, size)


def _gap(start: int, end: int) -> Iterator[Piece]:
    for at in range(start, end, BLOCK):
        yield Piece(at, min(BLOCK, end - at))
