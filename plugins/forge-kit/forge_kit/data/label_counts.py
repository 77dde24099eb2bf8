"""How many tokens of documents are learned as labels: the one count behind every share that is shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

if TYPE_CHECKING:
    from forge_core.contracts.data import Documents

PIECE = 2**24
"""Tokens whose mask is read at once."""


@frozen
class LabelCounts:
    """Tokens of documents, the end-of-text of each included, and how many of them are learned as labels."""

    tokens: int = 0
    learned: int = 0

    @classmethod
    def of(cls, tokens: int, learned: np.ndarray | None) -> LabelCounts:
        """Count some tokens; `learned` (tokens,) bool is their mask, None: all are learned."""
        return cls(tokens, tokens if learned is None else int(np.count_nonzero(learned)))

    @classmethod
    def of_documents(cls, documents: Documents) -> LabelCounts:
        """Count all documents, whose masks are read: a byte for each token."""
        counts, total = cls(), len(documents)
        for start in range(0, total, PIECE):
            stop = min(start + PIECE, total)
            counts += cls.of(stop - start, documents.learned(start, stop))
        return counts

    def __add__(self, other: LabelCounts) -> LabelCounts:
        return LabelCounts(self.tokens + other.tokens, self.learned + other.learned)

    def __str__(self) -> str:
        """`41.2% of 1,204,551 tokens learned`."""
        return f"{self.learned / self.tokens:.1%} of {self.tokens:,} tokens learned" if self.tokens else "no tokens"
