"""Which sample comes when: a pure function of the seed and the global sample number."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

ROUNDS = 4


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
        self._half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
        self._mask = (1 << self._half) - 1
        digest = hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS).digest()
        self._keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(ROUNDS)]

    def __getitem__(self, position: int) -> int:
        value = self._encrypt(position)
        while value >= self.size:
            value = self._encrypt(value)
        return value

    def _encrypt(self, value: int) -> int:
        left, right = value >> self._half, value & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._mask)
        return left << self._half | right


def _mix(value: int) -> int:
    """SplitMix64's finaliser: every input bit reaches every output bit."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    value = (value ^ value >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return value ^ value >> 31


class SampleOrder:
    """The endless sequence of samples of a mixture.

    Sources take turns so that after any n samples each has had its share of n to within one (the source furthest behind
    is next); within a source every epoch is a fresh permutation. The state is one integer a source: how many of its
    samples came so far.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int, counts: Sequence[int] = ()) -> None:
        """`sizes`: sequences in each source; `weights`: shares, any scale; `counts`: where to continue."""
        total = sum(weights)
        self._shares = [weight / total for weight in weights]
        self._sizes = list(sizes)
        self._seed = seed
        self.counts = list(counts) or [0] * len(sizes)
        self._permutations: dict[int, tuple[int, Permutation]] = {}

    def __iter__(self) -> Iterator[Sample]:
        return self

    def __next__(self) -> Sample:
        source = self._next_source()
        epoch, position = divmod(self.counts[source], self._sizes[source])
        self.counts[source] += 1
        return Sample(source, self._permutation(source, epoch)[position])

    def advance(self, samples: int) -> None:
        """Pass over so many samples."""
        if len(self._sizes) == 1:
            self.counts[0] += samples
            return
        for _ in range(samples):
            self.counts[self._next_source()] += 1

    def _next_source(self) -> int:
        if len(self._sizes) == 1:
            return 0
        number = sum(self.counts) + 1
        behind = [
            share * number - count if share else -1.0 for share, count in zip(self._shares, self.counts, strict=True)
        ]
        return max(range(len(behind)), key=behind.__getitem__)

    def _permutation(self, source: int, epoch: int) -> Permutation:
        cached = self._permutations.get(source)
        if cached is None or cached[0] != epoch:
            key = f"{self._seed}:{source}:{epoch}"
            self._permutations[source] = cached = (epoch, Permutation(self._sizes[source], key))
        return cached[1]
