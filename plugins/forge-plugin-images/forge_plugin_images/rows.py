"""Rows of documents that consist of tokens and visuals: images, or whatever else has grids of patches.

S: positions of a row, P: patches of a row at most, N: images of a row at most, V: values of a patch, n: entries of a
document.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from attrs import frozen

from forge_core.contracts.data import IGNORED_LABEL
from forge_plugin_vision import BROKEN, GRIDS, IMAGE, PATCHES, SECONDS

if TYPE_CHECKING:
    from forge_plugin_vision import Grid, ImageInput


class Tokens(NamedTuple):
    """A run of tokens."""

    ids: Sequence[int]
    learned: bool = True
    """Whether they are labels."""
    text_bytes: int = 0
    """UTF-8 bytes that they stand for, if they are labels and it is known."""


@frozen
class Places:
    """A run of positions that are no tokens."""

    count: int
    code: int = IMAGE
    """What their entries of `input_ids` are: `IMAGE` or `VIDEO`."""


@frozen
class Footprint:
    """What a visual takes in a row, known without decoding it."""

    runs: Sequence[Tokens | Places]
    """Its entries in order: a place for each position of its grids, and texts before, between or behind them."""
    grids: Sequence[Grid]
    """Its grids in order."""
    seconds: Sequence[float] = ()
    """Of each grid: seconds from one entry of its time axis to the next. Empty: 0, as for images."""

    @classmethod
    def of_images(cls, grids: Sequence[Grid], seen: ImageInput) -> Footprint:
        """Returns the footprint of images side by side, for a model that has `seen` as its input."""
        return cls([Places(seen.positions(grid)) for grid in grids], grids)

    @property
    def entries(self) -> int:
        """Entries of a document that it takes."""
        return sum(run.count if isinstance(run, Places) else len(run.ids) for run in self.runs)

    @property
    def patches(self) -> int:
        """Patches of all its grids, which `read` of the visual returns."""
        return sum(grid.patches for grid in self.grids)


class Needs(NamedTuple):
    """Room that a document takes in a row."""

    positions: int
    patches: int
    images: int


@frozen
class Document:
    """Entries in order, of which the last is only a label: n entries take n - 1 positions."""

    ids: np.ndarray
    """(n,) int64: tokens, and the code of each place that is none."""
    learned: np.ndarray
    """(n,) bool: which entries are labels of the position before them; never a place that is no token."""
    grids: Sequence[Grid]
    """Grids of its visuals, in order."""
    seconds: Sequence[float]
    """Of each grid; see `Footprint`."""

    @classmethod
    def of(cls, parts: Iterable[Tokens | Footprint]) -> Document:
        """Put parts one after the other."""
        ids, learned, grids, seconds = [np.zeros(0, np.int64)], [np.zeros(0, bool)], list[Any](), list[float]()
        for part in parts:
            for run in [part] if isinstance(part, Tokens) else part.runs:
                own = np.full(run.count, run.code) if isinstance(run, Places) else np.asarray(run.ids, np.int64)
                ids.append(own)
                learned.append(np.full(len(own), isinstance(run, Tokens) and run.learned))
            if isinstance(part, Footprint):
                grids.extend(part.grids)
                # Zeros for images, so that both lists have an entry for each grid
                seconds.extend(part.seconds or [0.0] * len(part.grids))
        return cls(np.concatenate(ids), np.concatenate(learned), grids, seconds)

    @property
    def needs(self) -> Needs:
        """Room in a row; positions are one fewer than entries, as the last entry is only a label."""
        return Needs(max(0, len(self.ids) - 1), sum(grid.patches for grid in self.grids), len(self.grids))

    @property
    def labels(self) -> np.ndarray:
        """(n - 1,) int64: the next entry where it is learned. The last position of an image predicts a token too."""
        return np.where(self.learned[1:], self.ids[1:], IGNORED_LABEL)


@frozen
class RowFormat:
    """Shape of every row of a job."""

    length: int
    """S."""
    patches: int
    """P."""
    images: int
    """N."""
    values: int
    """V."""
    filler: int
    """Token at positions that no document takes."""
    keeps_apart: bool = False
    """Whether rows have `document_ids` and `positions`, so that attention stays within a document."""

    @property
    def room(self) -> Needs:
        """What a row has room for, in the form of a document's `Needs`."""
        return Needs(self.length, self.patches, self.images)

    def row(
        self, documents: Sequence[Document], patches: Sequence[np.ndarray], broken: int = 0
    ) -> dict[str, np.ndarray]:
        """Put documents side by side; they fit.

        Args:
            documents: the documents of the row.
            patches: (patches, V) uint8 of all their visuals, in order.
            broken: documents that the row lacks, as a visual of them cannot be read.
        """
        inputs = np.full(self.length, self.filler, np.int64)
        labels = np.full(self.length, IGNORED_LABEL, np.int64)
        starts = np.zeros(self.length, bool)
        end = 0
        for document in documents:
            start, end = end, end + document.needs.positions
            # Each document has its last entry as a label only, so none predicts the next document.
            inputs[start:end], labels[start:end] = document.ids[:-1], document.labels
            starts[start] = True
        starts[end : end + 1] = True  # positions that are left over
        row = {"input_ids": inputs, "labels": labels, **self.visuals(documents, patches)}
        # An entry of every row, also where it is 0: all rows of a batch have the same entries.
        row[BROKEN] = np.array(broken, np.int64)
        return row | _places(starts) if self.keeps_apart else row

    def visuals(self, documents: Sequence[Document], patches: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the entries of a row that have its visuals: `patches`, `grids` and `grid_seconds`; see `row`."""
        all_grids = [grid for document in documents for grid in document.grids]
        # Of one size whatever the row has, so that batches stack; uint8 is a quarter of float32 in every copy.
        filled = np.zeros((self.patches, self.values), np.uint8)
        grids, seconds = np.zeros((self.images, 3), np.int64), np.zeros(self.images, np.float32)
        if all_grids:
            grids[: len(all_grids)] = all_grids
            seconds[: len(all_grids)] = [each for document in documents for each in document.seconds]
            np.concatenate(patches, out=filled[: sum(grid.patches for grid in all_grids)])
        return {PATCHES: filled, GRIDS: grids, SECONDS: seconds}


def _places(starts: np.ndarray) -> dict[str, np.ndarray]:
    """Returns `document_ids` and `positions`, (S,) int64, from 0; `starts` (S,) bool is where documents begin."""
    index = np.arange(len(starts))
    return {
        "document_ids": np.cumsum(starts) - 1,
        "positions": index - np.maximum.accumulate(np.where(starts, index, 0)),
    }
