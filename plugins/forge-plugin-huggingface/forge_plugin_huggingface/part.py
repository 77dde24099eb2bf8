"""Parts of a split: the rows to train on, or the rows held out."""

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
    """Every n-th row is held out, starting with the first; 0: none."""
    is_held_out: bool = False
    """Whether the part has the held-out rows, or the others."""
    limit: int = 0
    """Upper bound of the rows; 0: all."""

    def has(self, number: int) -> bool:
        """Whether row `number` belongs to it, ignoring the limit."""
        return not self.every or (number % self.every == 0) == self.is_held_out

    def numbers(self, rows: int) -> Iterator[int]:
        """Yields the numbers of its rows in a split of `rows` rows."""
        return islice(filter(self.has, range(rows)), self.limit or None)

    def key(self) -> Sequence[Any]:
        """Returns plain JSON that differs between parts."""
        return [self.split, self.every, self.is_held_out, self.limit]
