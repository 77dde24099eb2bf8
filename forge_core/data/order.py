"""The order of samples: a pure function of the seed and the global sample number.

No rank, worker or layout enters it, so another number of any of them continues the same sequence.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

ROUNDS = 4
BLOCK = 1024
"""Positions of a permutation that are evaluated at once."""
RESOLUTION = 1 << 40
"""The largest share if a temperature makes shares irrational."""


class Sample(NamedTuple):
    """A sequence to train on: `number` of `source`."""

    source: int
    number: int


class Permutation:
    """A pseudo-random permutation of range(size), evaluated at any position in O(1) time and memory.

    A Feistel network of four rounds on the smallest even number of bits that holds `size`; results outside the range
    are encrypted again until one lies inside (cycle walking, Black and Rogaway 2002). The domain is less than four
    times `size`, so this takes fewer than four tries on average.
    """

    def __init__(self, size: int, key: str) -> None:
        self.size = size
        half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
        self._half, self._mask = np.uint64(half), np.uint64((1 << half) - 1)
        # A digest and not `hash`, whose values for strings differ from process to process.
        self._keys = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS).digest(), "<u8")
        self._block_number, self._block = -1, [0]

    def __getitem__(self, position: int) -> int:
        # Positions are mostly read in order. In blocks one costs 0.5 µs; alone it costs 8 µs, more than reading it.
        number, offset = divmod(position, BLOCK)
        if number != self._block_number:
            self._block_number, self._block = number, self._evaluate(number * BLOCK)
        return self._block[offset]

    def _evaluate(self, start: int) -> list[int]:
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


def whole_shares(weights: Sequence[float], temperature: float = 1.0) -> list[int]:
    """The smallest whole numbers in the proportion of weight ** (1 / temperature); 0 for a weight of 0 only."""
    if temperature == 1:
        # Exact: a weight means its shortest decimal, so that 0.1 is a tenth and not the nearest float.
        exact = [Fraction(repr(weight)) for weight in weights]
        scale = math.lcm(*(weight.denominator for weight in exact))
        return smallest([int(weight * scale) for weight in exact])
    top = max(weights, default=0.0)
    flat = [(weight / top) ** (1 / temperature) if weight else 0.0 for weight in weights]
    shares = zip(flat, weights, strict=True)
    return smallest([max(1, round(share * RESOLUTION)) if weight else 0 for share, weight in shares])


def smallest(shares: Sequence[int]) -> list[int]:
    """The same proportions in the smallest whole numbers."""
    divisor = math.gcd(*shares) or 1
    return [share // divisor for share in shares]


class Turns:
    """Takes turns among sources with fixed shares. Its state is the number of turns of each source.

    The sequence is a chairman assignment (Tijdeman 1980): with k sources, after any n turns each has had its share of n
    to within 1 - 1/(2k - 2). With m = 2k - 2, turn c (from 0) of a source with share s

    - may come once s n - c >= 1/m, since it is then at most 1 - 1/m ahead of its share;
    - is due before s n - c > 1 - 1/m, since it would then be further behind.

    The source that is due first, of those that may come, takes the turn. `tests/data/test_turns.py` has the proof.
    """

    def __init__(self, shares: Sequence[int], taken: Sequence[int] = ()) -> None:
        """Continues after the turns `taken` by each source; `shares` holds one entry per source, 0 for never."""
        self.shares = list(shares)
        self.taken = list(taken) or [0] * len(shares)
        self.sources = [source for source, share in enumerate(shares) if share]
        """The sources that take turns."""
        # All arithmetic is in whole numbers, so that it is exact after any number of turns.
        self._turn, self._total = sum(self.taken), sum(shares)
        self._m = max(1, 2 * len(self.sources) - 2)
        self._opens, self._due = [0] * len(shares), [0] * len(shares)
        for source in self.sources:
            self._set_span(source)

    def take(self) -> int:
        """Returns the source whose turn it is."""
        self._turn += 1
        if len(self.sources) == 1:  # most jobs have one source, and counting its turns was a third of the loading
            self.taken[self.sources[0]] += 1
            return self.sources[0]
        # Not the source that is furthest behind: that greedy choice keeps no such bound.
        turn, opens, due = self._turn, self._opens, self._due
        chosen = min((source for source in self.sources if opens[source] <= turn), key=due.__getitem__)
        self.taken[chosen] += 1
        self._set_span(chosen)
        return chosen

    def _set_span(self, source: int) -> None:
        """Set the turns between which the next one of `source` must lie."""
        m, taken = self._m, self.taken[source] * self._m
        scaled = m * self.shares[source]
        self._opens[source] = -(-self._total * (taken + 1) // scaled)
        self._due[source] = self._total * (taken + m - 1) // scaled + 1


class SampleOrder:
    """The samples of a mixture, one after the other: without end, or until the sources are used up.

    Sources take turns (see `Turns`) by the shares of the phase, without those that have reached their limit. Within a
    source every epoch is a new permutation.
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
        """Starts at the first sample, or continues from `state`.

        Args:
            sizes: sequences in each source; None for a stream, which is read in its own order.
            names: one for each source, all different.
            phases: first sample and shares (see `whole_shares`) of each phase; the first begins at sample 0.
            limits: the most samples that each source yields in all; None if it is not limited.
            seed: seed of the permutations.
            state: from `state()`. Sources absent from it start at their first sample.
        """
        state = state or {"drawn": 0, "sources": {}}
        # By name, since the job of a continued run may have its sources in another order, or other ones.
        saved = {name: state["sources"].get(name, {"drawn": 0, "share": 0, "turns": 0}) for name in names}
        self.counts = [source["drawn"] for source in saved.values()]
        """Samples drawn so far from each source."""
        self.drawn: int = state["drawn"]
        """Samples drawn so far in all, including those from sources that the job no longer has."""
        self._sizes, self._names, self._phases, self._limits, self._seed = sizes, names, phases, limits, seed
        self._permutations: dict[int, tuple[int, Permutation]] = {}
        self._turns = Turns([0] * len(sizes))
        # Under the same shares the turns continue; else they are counted afresh, as at any change of shares.
        if _shares(state["sources"]) == _shares(saved):
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
        """Skips samples and returns how many were skipped: fewer than `samples` if the sources are used up."""
        for skipped in range(samples):
            if not self._turns.sources:
                return skipped
            self._turn()
        return samples

    def state(self) -> dict[str, Any]:
        """Returns the position as plain JSON: two integers a source, on which a new `SampleOrder` continues."""
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
        columns = zip(shares, self.counts, self._limits, strict=True)
        left = smallest([0 if limit is not None and count >= limit else share for share, count, limit in columns])
        # A phase that changes no share must not disturb the turns.
        if left != self._turns.shares:
            self._turns = Turns(left)
        self._next_phase = next((first for first, _ in self._phases if first > self.drawn), None)

    def _permutation(self, source: int, size: int, epoch: int) -> Permutation:
        cached = self._permutations.get(source)
        if cached is None or cached[0] != epoch:
            # The name and not the number: a source that is added or moved leaves the order of the others as it was.
            key = f"{self._seed}:{self._names[source]}:{epoch}"
            self._permutations[source] = cached = (epoch, Permutation(size, key))
        return cached[1]


def _shares(sources: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    return {name: source["share"] for name, source in sources.items() if source["share"]}
