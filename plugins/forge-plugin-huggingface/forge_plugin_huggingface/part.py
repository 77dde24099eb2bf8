"""Which rows of a split are meant: those to train on, or those held out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from attrs import frozen


@frozen
class SplitPart:
    """Rows of a split."""

    split: str
    every: int = 0
    """So many rows one is held out, starting with the first; 0: none."""
    is_held_out: bool = False
    """Whether these are the rows held out, or the others."""
    limit: int = 0
    """At most so many rows; 0: all."""

    def has(self, number: int) -> bool:
        """Whether row `number` belongs to it, but for the limit."""
        return not self.every or (number % self.every == 0) == self.is_held_out

    def numbers(self, rows: int) -> Iterator[int]:
        """The numbers of its rows, of `rows` rows."""
        return islice(filter(self.has, range(rows)), self.limit or None)

    def key(self) -> Sequence[Any]:
        """Plain JSON that tells parts from each other."""
        return [self.split, self.every, self.is_held_out, self.limit]
