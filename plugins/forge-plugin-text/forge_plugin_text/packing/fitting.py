"""Best-fit decreasing: packs pieces of documents into sequences.

Pieces of one length are interchangeable, as are sequences with the same room left. They are handled in groups, so that
the time in Python grows with the number of different lengths, not of documents: millions take seconds.

N: pieces.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np


class DocumentPieces(NamedTuple):
    """Documents in order; those longer than a sequence are cut into pieces."""

    starts: np.ndarray
    """(N,) int64: index of each piece's first token."""
    lengths: np.ndarray
    """(N,) int32: positions of each piece: inputs, each with the next token as its label."""


class Packing(NamedTuple):
    """The pieces of each sequence."""

    pieces: DocumentPieces
    """Pieces by sequence, and in the order of documents within a sequence."""
    bounds: np.ndarray
    """(sequences + 1,) int64: sequence i consists of pieces [bounds[i], bounds[i + 1])."""


def pack(ends: np.ndarray, seq_len: int) -> Packing:
    """Pack documents by best-fit decreasing; sequences are in the order of their first pieces.

    Args:
        ends: see `forge_core.contracts.data.Documents.ends`.
        seq_len: positions of a sequence.
    """
    pieces = cut(ends, seq_len)
    order, bounds = _in_order(fit(pieces.lengths, seq_len))
    return Packing(DocumentPieces(pieces.starts[order], pieces.lengths[order]), bounds)


def packed_blocks(ends: np.ndarray, seq_len: int, documents: int) -> Iterator[Packing]:
    """Pack so many documents at a time, each block by itself, so that memory does not grow with the corpus.

    Starts are those in the whole corpus; bounds count the pieces of a block. A block of millions of documents loses
    nothing but the room in its last sequences.

    Args:
        ends: see `pack`; may be a memory map.
        seq_len: positions of a sequence.
        documents: of a block.
    """
    for first in range(0, len(ends), documents):
        offset = int(ends[first - 1]) if first else 0
        (starts, lengths), bounds = pack(np.asarray(ends[first : first + documents]) - offset, seq_len)
        yield Packing(DocumentPieces(starts + offset, lengths), bounds)


def cut(ends: np.ndarray, seq_len: int) -> DocumentPieces:
    """Cut the n - 1 positions of each document of n tokens into pieces of `seq_len`, and a rest."""
    positions = np.diff(ends, prepend=0) - 1
    counts = -(-positions // seq_len)
    document = np.repeat(np.arange(len(positions)), counts)
    # All pieces numbered, less those before the document: the number of each within its own
    begin = (np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)) * seq_len
    lengths = np.minimum(seq_len, positions[document] - begin).astype(np.int32)
    return DocumentPieces((ends - positions - 1)[document] + begin, lengths)


def fit(lengths: np.ndarray, seq_len: int) -> np.ndarray:
    """Returns the sequence of each piece: (N,) -> (N,) int32.

    From the longest to the shortest piece, and in order among equals, each goes into the sequence with the least room
    that suffices, else into a new sequence.
    """
    # From the longest; stable, so that equal pieces keep the order of documents on every machine
    order = np.argsort(_small(seq_len - lengths, seq_len), kind="stable")
    counts = np.bincount(lengths, minlength=seq_len + 1)
    sequences, rooms = np.empty(len(lengths), np.int32), Rooms(seq_len)
    placed = 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        count = int(counts[length])
        sequences[order[placed : placed + count]] = rooms.place(length, count)
        placed += count
    return sequences


class Rooms:
    """Sequences, by their remaining room."""

    def __init__(self, seq_len: int) -> None:
        self._seq_len, self._opened = seq_len, 0
        self._sizes: list[int] = []
        """The different amounts of room, ascending."""
        self._sequences: dict[int, deque[np.ndarray]] = {}
        """Sequences with each amount of room."""

    def place(self, length: int, count: int) -> np.ndarray:
        """Place `count` pieces of a length, one after the other. Returns their sequences (count,)."""
        parts = []
        while count:
            room = self._least(length)
            each = room // length  # the sequence stays the one with the least room until it is full
            sequences = self._take(room, -(-count // each))
            here = min(count, each * len(sequences))
            parts.append(np.repeat(sequences, each)[:here])
            full, rest = divmod(here, each)
            self._put(room - each * length, sequences[:full])
            self._put(room - rest * length, sequences[full:])
            count -= here
        return np.concatenate(parts)

    def _least(self, length: int) -> int:
        """Returns the least room that suffices for `length`; the room of a new sequence if there is no other."""
        place = bisect_left(self._sizes, length)
        return self._sizes[place] if place < len(self._sizes) else self._seq_len

    def _take(self, room: int, most: int) -> np.ndarray:
        """Take up to `most` sequences with this room, at least one; new ones if there are none."""
        if room not in self._sequences:
            self._opened += most
            return np.arange(self._opened - most, self._opened, dtype=np.int32)
        waiting, taken = self._sequences[room], []
        while waiting and most:
            group = waiting.popleft()
            taken.append(group[:most])
            if len(group) > most:
                waiting.appendleft(group[most:])
            most -= len(taken[-1])
        if not waiting:
            del self._sequences[room]
            del self._sizes[bisect_left(self._sizes, room)]
        return np.concatenate(taken)

    def _put(self, room: int, sequences: np.ndarray) -> None:
        # Full sequences take no further piece, and are in no list.
        if not room or not len(sequences):
            return
        if room not in self._sequences:
            self._sequences[room] = deque()
            insort(self._sizes, room)
        self._sequences[room].append(sequences)


def _in_order(sequences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Orders pieces by sequence, sequences by their first piece: (order (N,), bounds (sequences + 1,))."""
    sizes = np.bincount(sequences)
    # Stable, so that the pieces of a sequence stay in order
    order = np.argsort(_small(sequences, len(sizes)), kind="stable")
    starts = np.cumsum(sizes) - sizes
    # First pieces are distinct numbers, so that this sort need not be stable.
    by_first = np.argsort(order[starts])
    sizes = sizes[by_first]
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    # Each sequence's range of `order`, moved from its old start to the new one
    return order[np.arange(len(order)) + np.repeat(starts[by_first] - bounds[:-1], sizes)], bounds


def _small(numbers: np.ndarray, most: int) -> np.ndarray:
    """Returns numbers in 16 bits if that suffices, since numpy sorts these by radix."""
    return numbers.astype(np.uint16) if most < 1 << 16 else numbers
