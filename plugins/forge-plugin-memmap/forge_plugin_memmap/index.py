"""Where documents end: from the index beside a shard, or else searched for by their end-of-text once and cached."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from forge_core import report_progress
from forge_core.contracts.errors import JobError
from forge_kit.data.cache import cached_folder, digest_of
from forge_plugin_memmap.files import Reader
from forge_plugin_memmap.shards import BLOCK, DocumentEnds, Shard

FORMAT = 1
"""Part of the key in the cache: raise it when the same shards give another index."""
GROUP = "memmap"
"""The cache's folder for facts about shards."""
FILE = "documents"


def document_ends(shards: Sequence[Shard], end_of_text: int, check: Callable[[], object] = lambda: None) -> np.ndarray:
    """(documents,) int64: the end of each document of the shards, one after the other; a memory map.

    A shard with an index ends with a document. In one without, every end-of-text ends a document, and what follows the
    last one belongs to a document that continues in the next shard. `check` is called before they are read: what was
    found once is in the cache.

    Raises:
        JobError: an index is damaged, or a shard without one has no end-of-text.
    """
    key = digest_of("ends", FORMAT, end_of_text, [shard.cache_key() for shard in shards])

    def make(folder: Path) -> dict[str, int]:
        check()
        with (folder / FILE).open("wb") as file:
            for ends in _all_ends(shards, end_of_text):
                # Plain numbers, piece by piece: an `.npy` would need their count first
                file.write(ends.astype("<i8").tobytes())
        return {}

    return map_file(cached_folder(GROUP, key, make).path / FILE)


def map_file(path: Path) -> np.ndarray:
    """A file of int64 as a memory map."""
    # As a plain array, whose slices are faster than slices of a `memmap`
    return np.memmap(path, "<i8", mode="r").view(np.ndarray)


def blocks(shard: Shard) -> Iterator[tuple[int, np.ndarray]]:
    """The ids of a shard, in pieces, each with its place."""
    reader, dtype = Reader(), np.dtype(shard.dtype)
    for start in range(0, shard.tokens, BLOCK):
        count = min(BLOCK, shard.tokens - start)
        report_progress(f"reading {shard.path}", start, shard.tokens)
        yield start, reader.read(shard.path, dtype, shard.offset + start * dtype.itemsize, count)


def _all_ends(shards: Sequence[Shard], end_of_text: int) -> Iterator[np.ndarray]:
    """Ends in all shards, in pieces, and the end of the last document, which may lack its end-of-text."""
    first = last = 0
    for shard in shards:
        for ends in _scanned(shard, end_of_text) if shard.ends is None else _listed(shard, shard.ends):
            last = first + int(ends[-1]) if len(ends) else last
            yield ends + first
        first += shard.tokens
    # Tokens after the last end-of-text are a document
    if last < first:
        yield np.array([first])


def _scanned(shard: Shard, end_of_text: int) -> Iterator[np.ndarray]:
    count = 0
    for start, ids in blocks(shard):
        # A document ends behind its end-of-text
        ends = np.flatnonzero(ids == end_of_text) + start + 1
        count += len(ends)
        yield ends
    if not count:
        message = f"none of the {shard.tokens} ids of {shard.path} is {end_of_text}, the end-of-text"
        raise JobError(f"{message}, so its documents cannot be told apart; correct end_of_text, or provide .ends")


def _listed(shard: Shard, index: DocumentEnds) -> Iterator[np.ndarray]:
    last = 0
    for ends in index.blocks():
        if not len(ends):
            continue
        # Compared with the block before, too; no document is empty
        if ends[0] <= last or (ends[1:] <= ends[:-1]).any():
            raise JobError(f"{index.path}: the ends of documents do not ascend; it is damaged")
        last = int(ends[-1])
        # Checked before it is signed: an unsigned end of 2^63 and more would become negative
        if last > shard.tokens:
            break
        yield ends.astype(np.int64)
    if last != shard.tokens:
        raise JobError(f"{index.path}: the last document ends at {last}, but {shard.name} has {shard.tokens} tokens")
