"""From chunks of the input to token ids, in this process or in worker processes.

N: ids of a block, D: documents that end in it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from forge_core.contracts.data import Tokenizer
from forge_core.contracts.errors import ForgeError, JobError
from forge_kit.data.tokenizers import begin_of_text
from forge_plugin_memmap.prepare.documents import PIECE_CHARACTERS, Drop, Dropped, Place, Text, pieces, utf8_size
from forge_plugin_memmap.prepare.inputs import Chunk, InputItem
from forge_plugin_memmap.prepare.origin_files import Origins
from forge_plugin_memmap.tokenizer_folder import load_kept

BATCH_BYTES = 1 << 18
"""Bytes of text that a tokenizer encodes in one call, about."""
BATCH_TEXTS = 1024
AHEAD = 2
"""Chunks that wait for each worker while it is busy."""


class Block(NamedTuple):
    """Ids of consecutive documents. The first may begin in an earlier block; the last may continue in the next."""

    ids: np.ndarray
    """(N,) of two or four bytes, each document with its end-of-text."""
    ends: np.ndarray
    """(D,) where documents end."""
    sizes: np.ndarray
    """(D + 1,) bytes of text of each document in this block; the last entry is of the one that continues, if any."""
    origins: Origins
    """Of the D documents: as they are counted, where a document ends."""

    def cut(self, first: int, stop: int | None = None) -> Block:
        """Returns documents [first, stop) of the block; without `stop` also the one that continues."""
        begin = int(self.ends[first - 1]) if first else 0
        if stop is None:
            return Block(self.ids[begin:], self.ends[first:] - begin, self.sizes[first:], self.origins.cut(first))
        end = int(self.ends[stop - 1]) if stop else 0
        # 0: no document continues after the cut
        sizes = np.append(self.sizes[first:stop], 0)
        return Block(self.ids[begin:end], self.ends[first:stop] - begin, sizes, self.origins.cut(first, stop))

    def select(self, chosen: np.ndarray) -> Block:
        """Returns some documents of the block: (D + 1,) whether each is chosen; the last one is one that continues."""
        lengths = np.diff(self.ends, prepend=0, append=len(self.ids))
        ended = chosen[:-1]
        sizes = np.append(self.sizes[:-1][ended], self.sizes[-1] if chosen[-1] else 0)
        ids, ends = self.ids[np.repeat(chosen, lengths)], np.cumsum(lengths[:-1][ended])
        return Block(ids, ends, sizes, self.origins.select(ended))


class Encoded(NamedTuple):
    """The encoded documents of a chunk."""

    block: Block
    dropped: Dropped


class Encoder:
    """Encodes chunks with a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, strict: bool, kept: int = 0) -> None:
        """If `strict`, an input that yields no document is an error unless it is empty; so many fields are `kept`."""
        self._tokenizer, self._strict, self._kept = tokenizer, strict, kept
        self._dtype, self._begin = id_dtype(tokenizer.vocab_size), begin_of_text(tokenizer)

    def encode(self, items: Iterable[InputItem]) -> Encoded:
        """Returns the ids of the documents of a chunk.

        Raises:
            JobError: strict, and something is wrong with the input.
            ForgeError: the tokenizer returned an id that no text has.
        """
        dropped = Dropped()
        # Arrays and not lists, in which each id would be an object
        ids, ends, sizes = array("q"), array("q"), array("q", [0])
        names: list[Place] = []
        inputs, lines, kept = list[int](), list[int](), list[tuple[bytes, ...]]()
        for batch in _batches(self._texts(items, dropped)):
            texts = [text.text for _, text in batch]
            for (number, text), encoded in zip(batch, self._tokenizer.encode_batch(texts), strict=True):
                ids.fromlist([*self._begin, *encoded] if text.is_first else encoded)
                sizes[-1] += text.size
                # Only the first piece of a document adds its name
                if len(names) == len(ends):
                    names.append(text.where)
                if text.is_last:
                    ids.append(self._tokenizer.end_of_text)
                    ends.append(len(ids))
                    sizes.append(0)
                    inputs.append(number)
                    lines.append(text.where.number)
                    kept.append(text.kept)
        origins = Origins.of(inputs, lines, kept, self._kept)
        block = Block(np.asarray(ids, np.int64), np.asarray(ends, np.int64), np.asarray(sizes, np.int64), origins)
        self._check(block, names)
        # Narrowed after the check, which a wrapped id would pass; fewer bytes go between processes.
        return Encoded(block._replace(ids=block.ids.astype(self._dtype)), dropped)

    def _texts(self, items: Iterable[InputItem], dropped: Dropped) -> Iterator[tuple[int, Text]]:
        """Yields each text with the number of its input."""
        for number, item in items:
            for document in item.documents():
                if isinstance(document, Drop):
                    refuse(document, self._strict)
                    dropped.add(document)
                else:
                    yield from ((number, piece) for piece in _in_pieces(document))

    def _check(self, block: Block, names: Sequence[Place]) -> None:
        """Refuse ids that are not in the vocabulary, and text that is encoded with the end-of-text."""
        size, end = self._tokenizer.vocab_size, self._tokenizer.end_of_text
        wrong = (block.ids < 0) | (block.ids >= size) | (block.ids == end)
        # The end-of-text that `encode` itself has appended
        wrong[block.ends - 1] = False
        if wrong.any():
            place = int(wrong.argmax())
            # To the right: at the end of a document begins the next one
            name = names[int(np.searchsorted(block.ends, place, side="right"))]
            raise ForgeError(
                f"the tokenizer encoded {name} with id {block.ids[place]}; ids of text lie within [0, {size}) and are "
                f"never {end}, the end-of-text. This is an error of the tokenizer"
            )


def refuse(drop: Drop, strict: bool) -> None:
    """Raises `JobError` if a document must not be left out: with `strict`, any document that is not empty."""
    if strict and drop.reason != "empty":
        fix = "correct it, or leave such documents out with --errors skip"
        raise JobError(f"{drop.where}: {drop.reason} ({drop.detail}); {fix}")


def id_dtype(vocab_size: int) -> str:
    """Returns the type of ids in a token file."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def _in_pieces(text: Text) -> Iterator[Text]:
    """Yields a document, in pieces if it is very long."""
    if len(text.text) <= PIECE_CHARACTERS:
        yield text
        return
    for number, (piece, is_last) in enumerate(pieces([text.text])):
        yield Text(text.where, piece, utf8_size(piece), is_last, number == 0, text.kept)


def _batches(texts: Iterable[tuple[int, Text]]) -> Iterator[list[tuple[int, Text]]]:
    """Yields groups of texts, in order, bounded in number and in size (a single text may exceed that)."""
    batch: list[tuple[int, Text]] = []
    size = 0
    for numbered in texts:
        batch.append(numbered)
        size += numbered[1].size
        if size >= BATCH_BYTES or len(batch) == BATCH_TEXTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


# --- workers -----------------------------------------------------------------------------------------------------


class Pool(Protocol):
    """Encodes chunks and returns the results in the order of the chunks."""

    def encode(self, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, Encoded]]: ...


@contextmanager
def open_pool(workers: int, tokenizer: Path, strict: bool, kept: int) -> Iterator[Pool]:
    """Opens worker processes; with one worker, this process encodes.

    Args:
        workers: number of processes.
        tokenizer: the folder that holds the tokenizer.
        strict: see `Encoder`.
        kept: likewise.

    Raises:
        ForgeError: within the context, a worker process ended.
    """
    if workers == 1:
        with _one_thread():
            yield InProcess(Encoder(load_kept(tokenizer), strict, kept))
        return
    executor = ProcessPoolExecutor(
        workers,
        multiprocessing.get_context("spawn"),  # a fork would copy threads of pyarrow and tokenizers in mid-flight
        initializer=_start,
        initargs=(tokenizer, strict, kept),
    )
    try:
        yield Processes(executor, workers)
    except BrokenProcessPool as error:
        fix = "run the same command again to continue; with fewer --workers if memory ran out"
        raise ForgeError(f"a worker process ended unexpectedly; {fix}") from error
    finally:
        # Chunks that have not begun are cancelled: after an error nobody reads their results
        executor.shutdown(wait=True, cancel_futures=True)


class InProcess:
    """See `Pool`."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    def encode(self, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, Encoded]]:
        """Encodes each chunk when it is asked for, so that one chunk is in memory."""
        return ((chunk, self._encoder.encode(chunk.items)) for chunk in chunks)


class Processes:
    """See `Pool`. Enough chunks are in flight that no worker waits, and few enough to bound memory."""

    def __init__(self, executor: ProcessPoolExecutor, workers: int) -> None:
        self._executor, self._limit = executor, (1 + AHEAD) * workers

    def encode(self, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, Encoded]]:
        """Submits chunks until enough are in flight, then yields the oldest whenever another is submitted."""
        in_flight: deque[tuple[Chunk, Future[Encoded]]] = deque()
        for chunk in chunks:
            # Without its items, which the worker has: memory holds each chunk once.
            in_flight.append((Chunk((), chunk.then), self._executor.submit(_encode, chunk.items)))
            if len(in_flight) >= self._limit:
                done, future = in_flight.popleft()
                yield done, future.result()
        while in_flight:
            done, future = in_flight.popleft()
            yield done, future.result()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Disable threads of the library `tokenizers`: the number of processes determines how many cores are used."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        os.environ.pop(name)
        os.environ |= {} if before is None else {name: before}


# --- in a worker process -----------------------------------------------------------------------------------------


class _Worker:
    """State of a worker process."""

    encoder: ClassVar[Encoder]


def _start(tokenizer: Path, strict: bool, kept: int) -> None:
    # One thread for each worker, as in `_one_thread`
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _Worker.encoder = Encoder(load_kept(tokenizer), strict, kept)


def _end_with_parent() -> None:
    # A worker whose parent was killed would wait for work for ever.
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode(items: tuple[InputItem, ...]) -> Encoded:
    return _Worker.encoder.encode(items)
