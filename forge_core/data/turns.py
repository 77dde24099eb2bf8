"""Whose turn it is among sources with fixed shares.

The sequence is a chairman assignment (Tijdeman 1980): with k sources, after any n turns each has had its share of n to
within 1 - 1/(2k - 2). It comes from deadlines. Let m = 2k - 2. Turn c (from 0) of a source with share s

- may come once s n - c >= 1/m, for it is then at most 1 - 1/m ahead of its share;
- is due before s n - c > 1 - 1/m, for it would then be further behind.

At every turn, of the sources that may come the one that is due first does. The bound holds since

1. one may always come: before turn n the differences s n - c add up to 1; if each were less than 1/m, they would add
   up to less than k/m <= 1;
2. nobody is late: to take what is due first meets all due times if they can be met at all, and they can if no N turns
   in a row, from turn a to turn b = a + N - 1, hold more than N of the spans between "may come" and "due" (Hall).
   Those of one source that lie within are fewer than s N + 2/m. If at most k - 1 sources have some, they are fewer
   than N + (k - 1) 2/m = N + 1. If all k have, then of each source these are the whole numbers c with
   s(a - 1) - 1/m < c < s b - 1 + 1/m. The first ones add up to more than a - 1 - k/m >= a - 2, the last ones plus 1 to
   less than b + k/m <= b + 1, so there are at most b - (a - 1) = N.

All arithmetic is in whole numbers, so that it is exact after any number of turns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

RESOLUTION = 1 << 40
"""The largest share, where a temperature makes them irrational."""


def whole_shares(weights: Sequence[float], temperature: float = 1.0) -> list[int]:
    """The smallest whole numbers in the proportion of weight ** (1 / temperature).

    At temperature 1 they are exact, a weight being what its shortest decimal says (0.1 is a tenth). A weight of 0 is a
    share of 0 at any temperature, and no other weight is.
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
    """Takes turns among sources. Its state is how many turns each has had."""

    def __init__(self, shares: Sequence[int], taken: Sequence[int] = ()) -> None:
        """`shares`: whole numbers, one a source, 0 for never; `taken`: turns so far, where to continue."""
        self.shares = list(shares)
        self.taken = list(taken) or [0] * len(shares)
        self.sources = [source for source, share in enumerate(shares) if share]
        """Those that take turns."""
        self._turn = sum(self.taken)
        self._total = sum(shares)
        self._m = max(1, 2 * len(self.sources) - 2)
        self._opens, self._due = [0] * len(shares), [0] * len(shares)
        for source in self.sources:
            self._set_span(source)

    def take(self) -> int:
        """The source that comes next."""
        self._turn += 1
        if len(self.sources) == 1:
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
