"""Documents of letters. T: number of ids of all documents."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

END, SPACE, FIRST_LETTER = 0, 1, 2
"""Ids of end-of-text, space and a; b to z follow."""


class LetterDocuments:
    """See `forge_core.contracts.data.Documents`. The job's packing builds sequences from them."""

    end_of_text = END

    def __init__(self, lines: Sequence[str], held_out: LetterDocuments | None = None) -> None:
        documents = [[*map(_id_of, line.lower()), END] for line in lines]
        self.held_out = held_out
        self.bytes_per_token: float | None = _mean_bytes(lines, documents)
        self._ids = np.array([id_ for document in documents for id_ in document], dtype=np.int64)
        self._ends = np.cumsum([len(document) for document in documents], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ids)

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Returns (stop - start,) ids, as a copy."""
        return self._ids[start:stop].copy()

    def learned(self, start: int, stop: int) -> np.ndarray | None:
        """Returns None: every id is learned as a label."""
        return None

    def where(self, start: int, stop: int) -> str:
        """Returns the location of these ids, for errors."""
        first, last = np.searchsorted(self._ends, (start, stop - 1), side="right") + 1
        return f"lines {first} to {last} of those with text"

    def ends(self) -> np.ndarray:
        """Returns (documents,) the end of each line, including its end-of-text."""
        return self._ends


def _id_of(character: str) -> int:
    return FIRST_LETTER + ord(character) - ord("a") if "a" <= character <= "z" else SPACE


def _mean_bytes(lines: Sequence[str], documents: Sequence[Sequence[int]]) -> float | None:
    tokens = sum(map(len, documents))
    return sum(len(line.encode()) for line in lines) / tokens if tokens else None
