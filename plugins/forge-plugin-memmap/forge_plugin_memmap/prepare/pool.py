"""Encoding chunks in worker processes, results in the order of the chunks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from forge_core.contracts.errors import ForgeError
from forge_plugin_memmap.prepare.documents import Item
from forge_plugin_memmap.prepare.encoding import Encoded, Encoder
from forge_plugin_memmap.prepare.reading import Chunk
from forge_plugin_memmap.tokenizer_folder import load_kept

AHEAD = 2
"""Chunks that wait for each worker while it is busy."""


class Pool(Protocol):
    """Gives what became of each chunk, in order."""

    def encode(self, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, Encoded]]: ...


@contextmanager
def open_pool(workers: int, tokenizer: Path, strict: bool) -> Iterator[Pool]:
    """Worker processes; with one worker, this process.

    Args:
        tokenizer: the folder that keeps it.

    Raises:
        ForgeError: within, a worker process ended.
    """
    if workers == 1:
        with _one_thread():
            yield InProcess(Encoder(load_kept(tokenizer), strict))
        return
    executor = ProcessPoolExecutor(
        workers,
        multiprocessing.get_context("spawn"),  # a fork would copy threads of pyarrow and tokenizers in mid-flight
        initializer=_start,
        initargs=(tokenizer, strict),
    )
    try:
        yield Processes(executor, workers)
    except BrokenProcessPool as error:
        fix = "run the same command again to continue; with fewer --workers if memory ran out"
        raise ForgeError(f"a worker process ended unexpectedly; {fix}") from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


class InProcess:
    """See `Pool`."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    def encode(self, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, Encoded]]:
        return ((chunk, self._encoder.encode(chunk.items)) for chunk in chunks)


class Processes:
    """See `Pool`. Enough chunks are in flight that no worker waits, and few enough to bound memory."""

    def __init__(self, executor: ProcessPoolExecutor, workers: int) -> None:
        self._executor, self._limit = executor, (1 + AHEAD) * workers

    def encode(self, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, Encoded]]:
        under_way: deque[tuple[Chunk, Future[Encoded]]] = deque()
        for chunk in chunks:
            under_way.append((Chunk((), chunk.then), self._executor.submit(_encode, chunk.items)))
            if len(under_way) >= self._limit:
                yield _result(*under_way.popleft())
        while under_way:
            yield _result(*under_way.popleft())


def _result(chunk: Chunk, future: Future[Encoded]) -> tuple[Chunk, Encoded]:
    return chunk, future.result()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Within, the library `tokenizers` uses no threads: processes are enough, and they would be one too many."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        os.environ.pop(name)
        os.environ |= {} if before is None else {name: before}


# --- in a worker process -----------------------------------------------------------------------------------------

_encoder: Encoder | None = None


def _start(tokenizer: Path, strict: bool) -> None:
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encoder = Encoder(load_kept(tokenizer), strict)


def _end_with_parent() -> None:
    """A worker of a process that was killed would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode(items: tuple[Item, ...]) -> Encoded:
    assert _encoder is not None
    return _encoder.encode(items)
