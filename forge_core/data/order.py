"""Which sample comes when: a pure function of the seed and the global sample number."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from forge_core.data.turns import Turns, smallest

ROUNDS = 4
BLOCK = 1024
"""Positions of a permutation that are evaluated at once."""


class Sample(NamedTuple):
    """A sequence to train on: `number` of `source`."""

    source: int
    number: int


class Permutation:
    """A pseudo-random permutation of range(size), evaluated at any point in O(1) time and memory.

    A Feistel network of four rounds on the smallest even number of bits that holds `size`; results outside the range
    are fed back until one lies inside (cycle walking, Black and Rogaway 2002). The domain is less than four times
    `size`, so this ends after fewer than four tries on average. Positions are evaluated a block at a time, since most
    that are asked for follow each other.
    """

    def __init__(self, size: int, key: str) -> None:
        self.size = size
        half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
        self._half, self._mask = np.uint64(half), np.uint64((1 << half) - 1)
        digest = hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS).digest()
        self._keys = np.frombuffer(digest, "<u8")
        self._number, self._block = -1, [0]

    def __getitem__(self, position: int) -> int:
        number, offset = divmod(position, BLOCK)
        if number != self._number:
            self._number, self._block = number, self._evaluate(number)
        return self._block[offset]

    def _evaluate(self, number: int) -> list[int]:
        """The results at the positions of a block."""
        start = number * BLOCK
        values = self._encrypt(np.arange(start, min(start + BLOCK, self.size), dtype=np.uint64))
        while (outside := values >= self.size).any():
            values[outside] = self._encrypt(values[outside])
        return values.tolist()

    def _encrypt(self, values: np.ndarray) -> np.ndarray:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._mask)
        return left << self._half | right


def _mix(values: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser: every input bit reaches every output bit. Products are modulo 2^64."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


class SampleOrder:
    """The samples of a mixture, one after the other, until the sources are used up or without end.

    Sources take turns by their shares (see `Turns`). The shares are those of the phase, less the sources that have
    reached their limit; wherever they change, turns are counted afresh. Within a source every epoch is a fresh
    permutation, keyed by the seed and the source's name, so that neither a phase nor another source disturbs it.
    """

    def __init__(
        self,
        sizes: Sequence[int | None],
        names: Sequence[str],
        phases: Sequence[tuple[int, Sequence[int]]],
        limits: Sequence[int | None],
        seed: int,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            sizes: sequences in each source; None for one that is read in its own order, whose samples are numbered on.
            names: one for each source, all different.
            phases: the first sample of each and the whole-numbered shares from there on (see `whole_shares`); the
                first phase begins at sample 0.
            limits: how many samples a source gives in all; None if it is not limited.
            state: where to continue, from `state()`. Sources that it does not know start at their first sample.
        """
        state = state or {"drawn": 0, "sources": {}}
        saved = {name: state["sources"].get(name, _UNSEEN) for name in names}
        self.counts = [source["drawn"] for source in saved.values()]
        """Samples drawn so far from each source."""
        self.drawn: int = state["drawn"]
        """Samples drawn so far in all, those of sources that are no longer there included."""
        self._sizes, self._names, self._phases, self._limits, self._seed = sizes, names, phases, limits, seed
        self._permutations: dict[int, tuple[int, Permutation]] = {}
        self._turns = Turns([0] * len(sizes))
        if _shares(state["sources"]) == _shares(saved):  # else the shares change here
            self._turns = Turns([s["share"] for s in saved.values()], [s["turns"] for s in saved.values()])
        self._settle()

    def __iter__(self) -> Iterator[Sample]:
        return self

    def __next__(self) -> Sample:
        if not self._turns.sources:
            raise StopIteration
        source = self._turn()
        number, size = self.counts[source] - 1, self._sizes[source]
        if size is None:
            return Sample(source, number)
        epoch, position = divmod(number, size)
        return Sample(source, self._permutation(source, size, epoch)[position])

    def advance(self, samples: int) -> int:
        """Pass over so many samples; gives how many there were."""
        for passed in range(samples):
            if not self._turns.sources:
                return passed
            self._turn()
        return samples

    def state(self) -> dict[str, Any]:
        """Where it is, as plain JSON: all that a new `SampleOrder` needs to continue, whatever the ranks."""
        columns = zip(self._names, self.counts, self._sizes, self._turns.shares, self._turns.taken, strict=True)
        sources = {
            name: {"drawn": drawn, "size": size, "share": share, "turns": turns}
            for name, drawn, size, share, turns in columns
        }
        return {"drawn": self.drawn, "sources": sources}

    def _turn(self) -> int:
        source = self._turns.take()
        self.counts[source] += 1
        self.drawn += 1
        if self.drawn == self._next_phase or self.counts[source] == self._limits[source]:
            self._settle()
        return source

    def _settle(self) -> None:
        """Take turns by the shares that hold from here on."""
        shares = next(shares for first, shares in reversed(self._phases) if first <= self.drawn)
        left = [
            0 if limit is not None and count >= limit else share
            for share, count, limit in zip(shares, self.counts, self._limits, strict=True)
        ]
        now = smallest(left)
        if now != self._turns.shares:
            self._turns = Turns(now)
        self._next_phase = next((first for first, _ in self._phases if first > self.drawn), None)

    def _permutation(self, source: int, size: int, epoch: int) -> Permutation:
        cached = self._permutations.get(source)
        if cached is None or cached[0] != epoch:
            key = f"{self._seed}:{self._names[source]}:{epoch}"
            self._permutations[source] = cached = (epoch, Permutation(size, key))
        return cached[1]


_UNSEEN: Mapping[str, int] = {"drawn": 0, "share": 0, "turns": 0}


def _shares(sources: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    return {name: source["share"] for name, source in sources.items() if source["share"]}


def source_changes(state: Mapping[str, Any], sizes: Mapping[str, int | None]) -> list[str]:
    """How the sources, by name, differ from those that `state` has the counts of, in words; empty if they do not.

    A source that was never drawn from may have any size.
    """
    saved: Mapping[str, Mapping[str, Any]] = state.get("sources", {})
    new = [f"source {name!r} is new" for name in sizes if saved and name not in saved]
    gone = [
        f"source {name!r} is gone, after {s['drawn']:,} sequences" for name, s in saved.items() if name not in sizes
    ]
    resized = [
        f"source {name!r} had {s['size']} sequences and has {sizes[name]}"
        for name, s in saved.items()
        if name in sizes and s["drawn"] and s["size"] != sizes[name]
    ]
    return [*new, *gone, *resized]
