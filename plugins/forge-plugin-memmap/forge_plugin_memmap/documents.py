"""Shards as documents. T: tokens of all shards, S: of one shard."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from forge_core import report_progress
from forge_core.contracts.data import Documents
from forge_kit.data.block_sums import (
    BLOCK,
    SHIFT,
    SUFFIX,
    SUMS,
    CheckedBlocks,
    blocks_of,
    native_sums,
    range_fault,
    sum_fault,
)
from forge_kit.data.cache import digest_of
from forge_kit.data.origins import Origin
from forge_plugin_memmap.files import Reader
from forge_plugin_memmap.index import document_ends
from forge_plugin_memmap.shards import Shard

PIECE = 1 << 22
"""Tokens that are verified at a time."""


class ShardedDocuments:
    """The documents of shards, one shard after the other; see `forge_core.contracts.data.Documents`.

    A pickled copy holds paths only. Documents that have no mask are learned as a whole.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        end_of_text: int,
        held_out: Documents | None = None,
        limit: int | None = None,
        cache_bytes: int = 0,
    ) -> None:
        """Open the shards.

        Args:
            shards: in order.
            end_of_text: id that ends a document.
            held_out: documents that never occur in training.
            limit: ids must be below it, and the vocabulary size that a shard states, where given.
            cache_bytes: size of the cache for blocks of remote shards.
        """
        self.end_of_text = end_of_text
        self._limit = limit
        self.held_out: Documents | None = held_out
        self._shards = tuple(shards)
        self._starts = [0, *accumulate(shard.tokens for shard in shards)]
        self._dtypes = [np.dtype(shard.dtype) for shard in shards]
        self._masks = [shard.mask for shard in shards]
        stamps = {path: stamp for shard in shards for path, stamp in shard.stamps.items()}
        self._cache_bytes = cache_bytes
        self._reader = Reader(stamps, cache_bytes)
        self._checks: dict[tuple[int, str], CheckedBlocks] = {}
        self._ends: np.ndarray | None = None
        self._identity = digest_of([shard.content_key() for shard in shards])

    @property
    def bytes_per_token(self) -> float | None:
        """UTF-8 bytes of text for each token; None unless every shard states its bytes."""
        known = all(shard.text_bytes for shard in self._shards)
        return sum(shard.text_bytes for shard in self._shards) / len(self) if known else None

    def __len__(self) -> int:
        return self._starts[-1]

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Returns ids [start, stop), as int64; blocks that are read for the first time are checked.

        Raises:
            DataError: a block is damaged, or has an id beyond the vocabulary.
        """
        number = self._shard_of(start)
        first = self._starts[number]
        # The usual case, of one shard, without a list and a concatenation
        if stop <= self._starts[number + 1]:
            return self._ids(number, start - first, stop - first).astype(np.int64)
        return np.concatenate([self._ids(*part) for part in self._parts(start, stop)], dtype=np.int64)

    def learned(self, start: int, stop: int) -> np.ndarray | None:
        """Returns the mask of tokens [start, stop); True for shards without one. None: no shard has one."""
        if not any(self._masks):
            return None
        return np.concatenate([self._mask(*part) for part in self._parts(start, stop)])

    def ends(self) -> np.ndarray:
        """Returns the end of each document, (documents,) int64, mapped at the first call."""
        if self._ends is None:
            self._ends = document_ends(self._shards, self.end_of_text, self._check_ends)
        return self._ends

    def verify(self) -> None:
        """See `forge_kit.data.budgets.Verifiable`."""
        self._check_ends()
        for start in range(0, len(self), PIECE):
            report_progress("verifying shards", start, len(self))
            # For its checks; the ids are discarded
            self.tokens(start, start + PIECE)

    def identity(self) -> str:
        """See `HasIdentity`. The sizes and times of the files as they were when the run began."""
        return self._identity

    def where(self, start: int, stop: int) -> str:
        """Returns the files and the places in them, from the start of each file."""
        parts = ((self._shards[number].name, first, last) for number, first, last in self._parts(start, stop))
        return "tokens " + " and ".join(f"{first} to {last} of {path}" for path, first, last in parts)

    def origins(self, numbers: np.ndarray) -> list[Origin | None]:
        """See `forge_kit.data.origins.HasOrigins`: None for documents of shards that have no list of origins."""
        # Documents before each shard: those that end at or before its first token
        firsts = np.searchsorted(self.ends(), self._starts, side="right")
        found: list[Origin | None] = []
        for number in np.unique(np.searchsorted(firsts, numbers, side="right") - 1):
            shard = self._shards[number]
            first, stop = firsts[number], firsts[number + 1]
            own = numbers[(numbers >= first) & (numbers < stop)] - first
            found += [None] * len(own) if shard.origins is None else shard.origins.read(own)
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        # Without open files and what was checked: each worker opens and checks what it reads.
        return ShardedDocuments, (self._shards, self.end_of_text, self.held_out, self._limit, self._cache_bytes)

    def _shard_of(self, token: int) -> int:
        # Without the last entry, the end of all shards: a token there belongs to the last shard
        return bisect_right(self._starts, token, hi=len(self._shards)) - 1

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The shards that tokens [start, stop) lie in, by number, with the places in them; at least one."""
        number, end, stop = self._shard_of(start), start, min(stop, len(self))
        while True:
            first, start, end = self._starts[number], end, min(stop, self._starts[number + 1])
            yield number, start - first, end - first
            if end >= stop:
                return
            number += 1

    def _ids(self, number: int, start: int, stop: int) -> np.ndarray:
        shard, dtype = self._shards[number], self._dtypes[number]
        # Sums are of the file's blocks, from its first byte; ids are checked from the first id.
        base = shard.offset if shard.summed else 0
        self._blocks(number, shard.path).demand(base + start * dtype.itemsize, base + stop * dtype.itemsize)
        return self._reader.read(shard.path, dtype, shard.offset + start * dtype.itemsize, stop - start)

    def _check_ends(self) -> None:
        for number, shard in enumerate(self._shards):
            if shard.summed and shard.ends:
                self._blocks(number, shard.ends.path).demand(0, shard.stamps[shard.ends.path][0])

    def _blocks(self, number: int, path: str) -> CheckedBlocks:
        """The blocks of a file of a shard: by their sums, or else by the range of their ids."""
        shard = self._shards[number]
        # Unpacked shards share one file, whose blocks are checked once; ids are checked from the first one of a shard
        key = (0 if shard.summed else number, path)
        if key not in self._checks:
            fault = self._damage_of(shard, path) if shard.summed else partial(self._beyond, number)
            self._checks[key] = CheckedBlocks(shard.stamps[path][0], fault)
        return self._checks[key]

    def _damage_of(self, shard: Shard, path: str) -> Callable[[int], str]:
        """Returns a function that compares a block with its sum. All sums are read at once: 64 kB for 1 GB."""
        size = shard.stamps[path][0]
        where, dtype = path + SUFFIX, np.dtype("u1")
        sums = native_sums(where, self._reader.read(where, np.dtype(SUMS), 0, blocks_of(size)), size)

        def fault(block: int) -> str:
            first = block << SHIFT
            data = self._reader.read(path, dtype, first, min(BLOCK, size - first))
            return sum_fault(path, block, data, sums[block], "restore it from a copy, or prepare the data again")

        return fault

    def _beyond(self, number: int, block: int) -> str:
        shard, dtype = self._shards[number], self._dtypes[number]
        known = [limit for limit in (shard.vocab_size, self._limit) if limit]
        if not known:
            return ""
        first, last = (min(place * BLOCK // dtype.itemsize, shard.tokens) for place in (block, block + 1))
        ids = self._reader.read(shard.path, dtype, shard.offset + first * dtype.itemsize, last - first)
        return range_fault(shard.path, ids, first, min(known))

    def _mask(self, number: int, start: int, stop: int) -> np.ndarray:
        mask = self._masks[number]
        if mask is None:
            return np.ones(stop - start, dtype=bool)
        # One byte for each token, so the number of a token is its offset
        return self._reader.read(mask.path, np.dtype(bool), mask.offset + start, stop - start)
