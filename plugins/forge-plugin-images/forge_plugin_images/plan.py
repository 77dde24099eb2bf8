"""Which documents share a row: planned from the index alone, and the same on every rank."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from attrs import define, field, frozen

from forge_kit.data.cache import cached_folder, digest_of
from forge_plugin_images.rows import Needs

FORMAT = 1
"""Part of the key: increase it when the same documents are put into other rows."""
TRIED = 64
"""Open rows that a document is compared with before a new row is opened; more would hardly fill rows better."""
NAMES = ("documents.npy", "bounds.npy")


@frozen
class Plan:
    """The documents of each row."""

    documents: np.ndarray
    """(documents,) int64: numbers of documents, by row, ascending in each."""
    bounds: np.ndarray
    """(rows + 1,) int64: row i has the documents [bounds[i], bounds[i + 1])."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, row: int) -> list[int]:
        """Returns the numbers of a row's documents."""
        return self.documents[self.bounds[row] : self.bounds[row + 1]].tolist()

    @classmethod
    def of_rows(cls, rows: list[list[int]]) -> Plan:
        """Put rows into the order of their first documents."""
        # Rows were opened for the largest documents first: an unshuffled epoch would begin with these
        ordered = sorted(map(sorted, rows))
        sizes = [0, *map(len, ordered)]
        return cls(np.array([number for row in ordered for number in row], np.int64), np.cumsum(sizes))


def alone(numbers: np.ndarray) -> Plan:
    """Returns the plan that gives each document a row."""
    return Plan(numbers, np.arange(len(numbers) + 1))


def stored_plan(identity: str, numbers: np.ndarray, entries: np.ndarray, room: Needs) -> Plan:
    """Returns the packed rows of some documents, from the cache if they were planned before.

    Args:
        identity: of the index; part of the key, as are the other arguments.
        numbers: the documents to pack, ascending.
        entries: the index, of all documents.
        room: room of a row.
    """

    def make(folder: Path) -> dict[str, int]:
        plan = packed(numbers, entries, room)
        for name, array in zip(NAMES, (plan.documents, plan.bounds), strict=True):
            np.save(folder / name, array)
        return {"rows": len(plan)}

    key = digest_of(FORMAT, identity, digest_of(numbers.tolist()), list(room))
    stored = cached_folder("image-rows", key, make)
    return Plan(*(np.load(stored.path / name) for name in NAMES))


def packed(numbers: np.ndarray, entries: np.ndarray, room: Needs) -> Plan:
    """Pack documents by best-fit decreasing.

    From the one that needs most of any of the three kinds of room, each document goes into the open row with the fewest
    positions left that suffice, if its patches and images fit there too.
    """
    needs = np.stack([entries[name][numbers] for name in ("positions", "patches", "images")], axis=1)
    # Stable: equal documents keep their order, whichever sort numpy chooses for the CPU. A room of 0 is not divided by.
    order = np.argsort(-(needs / np.maximum(room, 1)).max(axis=1), kind="stable")
    rows = OpenRows(room)
    for place in order.tolist():
        rows.place(int(numbers[place]), Needs(*needs[place].tolist()))
    return Plan.of_rows(rows.documents)


@define
class OpenRows:
    """Rows that are being filled."""

    room: Needs
    documents: list[list[int]] = field(factory=list)
    """Documents of each row, the full ones too."""
    _rooms: list[Needs] = field(factory=list)
    """Room left in each row."""
    _sizes: list[int] = field(factory=list)
    """The different numbers of positions left, ascending."""
    _by_positions: dict[int, list[int]] = field(factory=lambda: defaultdict(list))
    """Rows by the positions that they have left."""

    def place(self, number: int, needs: Needs) -> None:
        """Put a document into the row that suits it best."""
        row = next(self._suitable(needs), None)
        if row is None:
            row = len(self.documents)
            self.documents.append([])
            self._rooms.append(self.room)
        else:
            # Out of the lists before its room changes, by which they are sorted
            self._close(row)
        self.documents[row].append(number)
        self._rooms[row] = Needs(*(left - need for left, need in zip(self._rooms[row], needs, strict=True)))
        self._open(row)

    def _suitable(self, needs: Needs) -> Iterator[int]:
        """Yields rows with enough room, those with the fewest positions left first."""
        candidates = (
            row for size in self._sizes[bisect_left(self._sizes, needs.positions) :] for row in self._by_positions[size]
        )
        # Positions suffice in all of them; patches and images may not
        for row in islice(candidates, TRIED):
            if all(left >= need for left, need in zip(self._rooms[row], needs, strict=True)):
                yield row

    def _open(self, row: int) -> None:
        positions = self._rooms[row].positions
        # A full row would use up one of the `TRIED` candidates of each document without positions
        if not positions:
            return
        if positions not in self._by_positions:
            insort(self._sizes, positions)
        self._by_positions[positions].append(row)

    def _close(self, row: int) -> None:
        positions = self._rooms[row].positions
        self._by_positions[positions].remove(row)
        if not self._by_positions[positions]:
            del self._by_positions[positions]
            del self._sizes[bisect_left(self._sizes, positions)]
