"""Which sample comes when: a pure function of the seed and the global sample number."""

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
"""The largest share, where a temperature makes them irrational."""


class Sample(NamedTuple):
    """A sequence to train on: `number` of `source`."""

    source: int
    number: int


class Permutation:
    """A pseudo-random permutation of range(size), evaluated at any point in O(1) time and memory.

    A Feistel network of four rounds on the smallest even number of bits that holds `size`; results outside the range
    are fed back until one lies inside (cycle walking, Black and Rogaway 2002). The domain is less than four times
    `size`, so this ends after fewer than four tries on average.
    """

    def __init__(self, size: int, key: str) -> None:
        self.size = size
        half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
        self._half, self._mask = np.uint64(half), np.uint64((1 << half) - 1)
        digest = hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS).digest()
        self._keys = np.frombuffer(digest, "<u8")
        self._number, self._block = -1, [0]

    def __getitem__(self, position: int) -> int:
        # Positions are mostly read in order: a block at a time spreads NumPy's overhead per call.
        number, offset = divmod(position, BLOCK)
        if number != self._number:
            self._number, self._block = number, self._evaluate(number)
        return self._block[offset]

    def _evaluate(self, number: int) -> list[int]:
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


def whole_shares(weights: Sequence[float], temperature: float = 1.0) -> list[int]:
    """The smallest whole numbers in the proportion of weight ** (1 / temperature).

    At temperature 1 they are exact: a weight means its shortest decimal (0.1 is a tenth).
    Only a weight of 0 has a share of 0.
    """
    if temperature == 1:
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
    to within 1 - 1/(2k - 2). It comes from deadlines. Let m = 2k - 2. Turn c (from 0) of a source with share s

    - may come once s n - c >= 1/m, for it is then at most 1 - 1/m ahead of its share;
    - is due before s n - c > 1 - 1/m, for it would then be further behind.

    At every turn, among the sources that may come the one that is due first does. The bound holds since

    1. one may always come: before turn n the differences s n - c add up to 1; if each were less than 1/m, they would
       add up to less than k/m <= 1;
    2. nobody is late: taking the source due first meets all due times if they can be met at all, and they can if no N
       turns in a row, from turn a to turn b = a + N - 1, hold more than N of the spans between "may come" and "due"
       (Hall). Of one source, fewer than s N + 2/m lie within. If at most k - 1 sources have some, they are fewer than
       N + (k - 1) 2/m = N + 1. If all k have, then of each source these are the whole numbers c with
       s(a - 1) - 1/m < c < s b - 1 + 1/m. The first ones add up to more than a - 1 - k/m >= a - 2, the last ones plus 1
       to less than b + k/m <= b + 1, so there are at most b - (a - 1) = N.

    All arithmetic is in whole numbers, so that it is exact after any number of turns.
    """

    def __init__(self, shares: Sequence[int], taken: Sequence[int] = ()) -> None:
        """`shares`: one for each source, 0 for never. `taken`: turns that each source has had, if it continues."""
        self.shares = list(shares)
        self.taken = list(taken) or [0] * len(shares)
        self.sources = [source for source, share in enumerate(shares) if share]
        """The sources that take turns."""
        self._turn = sum(self.taken)
        self._total = sum(shares)
        self._m = max(1, 2 * len(self.sources) - 2)
        self._opens, self._due = [0] * len(shares), [0] * len(shares)
        for source in self.sources:
            self._set_span(source)

    def take(self) -> int:
        """The source that comes next."""
        self._turn += 1
        if len(self.sources) == 1:  # no spans to compare; most jobs have one source
            self.taken[self.sources[0]] += 1
            return self.sources[0]
        turn, opens, due = self._turn, self._opens, self._due
        chosen = min((source for source in self.sources if opens[source] <= turn), key=due.__getitem__)
        self.taken[chosen] += 1
        self._set_span(chosen)
        return chosen

    def _set_span(self, source: int) -> None:
        """The turns between which the source's next one must lie."""
        m, total, had = self._m, self._total, self.taken[source] * self._m
        scaled = m * self.shares[source]
        self._opens[source] = -(-total * (had + 1) // scaled)
        self._due[source] = total * (had + m - 1) // scaled + 1


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
            sizes: sequences in each source; None for a stream, which is read in its own order.
            names: one for each source, all different.
            phases: first sample and shares (see `whole_shares`) of each phase; the first begins at sample 0.
            limits: the most samples that each source yields in all; None if it is not limited.
            seed: seed of the permutations.
            state: where to continue, from `state()`. Sources absent from it start at their first sample.
        """
        state = state or {"drawn": 0, "sources": {}}
        saved = {name: state["sources"].get(name, {"drawn": 0, "share": 0, "turns": 0}) for name in names}
        self.counts = [source["drawn"] for source in saved.values()]
        """Samples drawn so far from each source."""
        self.drawn: int = state["drawn"]
        """Samples drawn so far in all, also from sources that the job no longer has."""
        self._sizes, self._names, self._phases, self._limits, self._seed = sizes, names, phases, limits, seed
        self._permutations: dict[int, tuple[int, Permutation]] = {}
        self._turns = Turns([0] * len(sizes))
        # Turns continue only under the same shares; otherwise they are counted afresh, as at any change of shares.
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
        """Skips samples; returns how many were skipped, fewer once the sources are used up."""
        for passed in range(samples):
            if not self._turns.sources:
                return passed
            self._turn()
        return samples

    def state(self) -> dict[str, Any]:
        """Returns the position as plain JSON: all that a new `SampleOrder` needs, on any number of ranks."""
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
        current = smallest(left)
        if current != self._turns.shares:
            self._turns = Turns(current)
        self._next_phase = next((first for first, _ in self._phases if first > self.drawn), None)

    def _permutation(self, source: int, size: int, epoch: int) -> Permutation:
        cached = self._permutations.get(source)
        if cached is None or cached[0] != epoch:
            key = f"{self._seed}:{self._names[source]}:{epoch}"
            self._permutations[source] = cached = (epoch, Permutation(size, key))
        return cached[1]


def _shares(sources: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    return {name: source["share"] for name, source in sources.items() if source["share"]}


def source_changes(
    state: Mapping[str, Any], sizes: Mapping[str, int | None], identities: Mapping[str, str] | None = None
) -> list[str]:
    """One message for each difference between the sources and those of a saved state.

    Args:
        state: from `TrainLoader.state()`.
        sizes: sequences of each source by name, None for a stream.
        identities: of the sources that know theirs (see `HasIdentity`).
    """
    saved: Mapping[str, Mapping[str, Any]] = state.get("sources", {})
    new = [f"source {name!r} is new" for name in sizes if saved and name not in saved]
    gone = [
        f"source {name!r} is gone, after {s['drawn']:,} sequences" for name, s in saved.items() if name not in sizes
    ]
    changed = [
        f"source {name!r} {message}"
        for name, s in saved.items()  # a source that was never drawn from may have any size and content
        if name in sizes and s["drawn"] and (message := _difference(s, sizes[name], (identities or {}).get(name, "")))
    ]
    return [*new, *gone, *changed]


def _difference(saved: Mapping[str, Any], size: int | None, identity: str) -> str:
    if saved["size"] != size:
        return f"had {saved['size']} sequences and has {size}"
    # Either may be unknown: older checkpoints hold no identities, and not every source has one.
    before = saved.get("identity")
    return "has another content than it had" if before and identity and before != identity else ""
