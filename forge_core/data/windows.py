"""Windows of S + 1 tokens over concatenated documents: for training, and in order for evaluation."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forge_core.contracts.data import IGNORED_LABEL, Dataset, Documents, Sample, identity_of
from forge_core.data.packing import WindowPacking


class Window(NamedTuple):
    """S + 1 consecutive tokens: S inputs, and as many labels, shifted by one."""

    tokens: np.ndarray
    """(S + 1,) int64."""
    starts: np.ndarray | None
    """(S + 1,) bool: whether a document begins with this token; None for packings that do not need it."""
    learned: np.ndarray | None
    """(S + 1,) bool: whether the token is learned as a label; None: all are."""

    def labels(self) -> np.ndarray:
        """(S,) int64: the token after each position; `IGNORED_LABEL` where it is not learned."""
        labels = self.tokens[1:]
        return labels if self.learned is None else np.where(self.learned[1:], labels, IGNORED_LABEL)


class TrainingWindows:
    """Sequence i covers tokens [iS, iS + S].

    Each window shares one token with the next, the last label of the one and the first input of the other: so every
    token is an input once, and but for the very first a label once.
    """

    def __init__(self, documents: Documents, seq_len: int, packing: WindowPacking) -> None:
        self._documents, self._seq_len, self._packing = documents, seq_len, packing
        held_out = documents.held_out
        self.held_out: Dataset | None = None if held_out is None else HeldOutWindows(held_out, seq_len, packing)
        self.bytes_per_token = None if held_out is None else held_out.bytes_per_token
        self._length = max(len(documents) - 1, 0) // seq_len  # kept: it is asked for at every sequence

    def identity(self) -> str:
        return identity_of(self._documents)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Sample:
        start = checked(index, self._length) * self._seq_len
        stop = start + self._seq_len + 1
        starts = starts_within(self._documents.ends(), start, stop) if self._packing.needs_boundaries else None
        window = Window(self._documents.tokens(start, stop), starts, self._documents.learned(start, stop))
        return self._packing.sequence(window)

    def where(self, index: int) -> str:
        start = index * self._seq_len
        return self._documents.where(start, start + self._seq_len + 1)


class HeldOutWindows:
    """Windows in which every token is the label of exactly one position, in order, so that all of them are measured.

    Sequence i has labels [iS, iS + S); its inputs are the tokens before them, an end-of-text before the very first. The
    last sequence is padded with end-of-text as inputs and ignored labels.
    """

    def __init__(self, documents: Documents, seq_len: int, packing: WindowPacking) -> None:
        self._documents, self._seq_len, self._packing = documents, seq_len, packing
        self.held_out: Dataset | None = None
        self.bytes_per_token = documents.bytes_per_token

    def __len__(self) -> int:
        return (len(self._documents) + self._seq_len - 1) // self._seq_len

    def __getitem__(self, index: int) -> Sample:
        first = checked(index, len(self)) * self._seq_len
        last = min(first + self._seq_len, len(self._documents))
        before = min(first, 1)  # the first window has no token before it
        padding = 1 - before, self._seq_len - (last - first)
        tokens = self._documents.tokens(first - before, last)
        mask = self._documents.learned(first - before, last)
        learned = np.pad(np.ones(len(tokens), dtype=bool) if mask is None else mask, padding)
        tokens = np.pad(tokens, padding, constant_values=self._documents.end_of_text)
        bounds = first - 1, first + self._seq_len
        starts = starts_within(self._documents.ends(), *bounds) if self._packing.needs_boundaries else None
        return self._packing.sequence(Window(tokens, starts, learned))


def starts_within(ends: np.ndarray, start: int, stop: int) -> np.ndarray:
    """(stop - start,) bool: whether each token of [start, stop) begins a document. `ends`: see `Documents`."""
    starts = np.zeros(stop - start, dtype=bool)
    first, last = np.searchsorted(ends, (start, stop))
    starts[ends[first:last] - start] = True
    if start <= 0:
        starts[-start] = True
    return starts


def checked(index: int, length: int) -> int:
    """Returns `index`; raises IndexError if it is not in [0, length)."""
    if not 0 <= index < length:
        raise IndexError(f"sequence {index} of {length}")
    return index
