"""Questions in the rows of a dataset with images: what stands before a learned text, and that text.

Shapes: S positions of a row, N images of a row at most, P patches of a row, V values of a patch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from attrs import field, frozen

from forge_core.contracts.data import IGNORED_LABEL
from forge_core.contracts.errors import DataError
from forge_plugin_vision import GRIDS, PATCHES, SECONDS, Grid

if TYPE_CHECKING:
    from forge_plugin_vision import ImageInput

Row = Mapping[str, np.ndarray]


@frozen
class Question:
    """A run of learned tokens of a document that follows an image: the answer to everything before it."""

    document: int
    """Number of the document in its row."""
    prompt: np.ndarray = field(eq=False)
    """(n,) int64: the document up to where the answer begins, negative at the positions of images."""
    answer: np.ndarray = field(eq=False)
    """(m,) int64: the learned tokens, with what ends them."""
    images: tuple[int, int]
    """The row's images that the prompt has: from, and up to without."""

    def entries(self, row: Row) -> dict[str, np.ndarray]:
        """Returns the row's image entries with the images of the prompt alone; see `images_of`."""
        return images_of(row, *self.images)


def images_of(row: Row, first: int, stop: int) -> dict[str, np.ndarray]:
    """Returns `patches` (P, V), `grids` (N, 3) and `grid_seconds` (N,) of images `first` to `stop` of a row alone.

    Images behind a prompt must not be there: a model may take the positions that follow from all images of a row.
    """
    sizes = np.array([Grid(*grid).patches for grid in row[GRIDS].tolist()])  # no product for tiles that are joined
    patches = int(sizes[:first].sum()), int(sizes[:stop].sum())
    ranges = {PATCHES: patches, GRIDS: (first, stop), SECONDS: (first, stop)}
    return {name: _moved(row[name], *ranges[name]) for name in ranges if name in row}


def _moved(values: np.ndarray, first: int, stop: int) -> np.ndarray:
    """Returns an array of equal shape with entries `first` to `stop` at its beginning, and zeros behind them."""
    moved = np.zeros_like(values)
    moved[: stop - first] = values[first:stop]
    return moved


def questions_of(row: Row, seen: ImageInput) -> Iterator[Question]:
    """Yields the questions of a row, of each document in order: every run of learned tokens behind an image.

    In a conversation each answer is one, after the right answers of the turns before.

    Args:
        row: of a dataset, packed or not.
        seen: what the model sees.

    Raises:
        DataError: it is not known which positions belong to which image.
    """
    if GRIDS not in row or not row[GRIDS].any():
        return
    ids, labels = row["input_ids"].astype(np.int64), row["labels"].astype(np.int64)
    places = (ids < 0).cumsum()
    ends = ends_of_images(row, seen)
    for number, (start, end) in enumerate(_documents(row)):
        before = int(places[start - 1]) if start else 0
        for first, stop in _runs(labels[start:end] != IGNORED_LABEL, start):
            # At least one position of an image of the same document stands before the answer.
            if places[first] > before:
                # Neither documents nor answers begin within an image, so both numbers are ends
                images = ends[before], ends[int(places[first])]
                yield Question(number, ids[start : first + 1], labels[first:stop], images)


def _documents(row: Row) -> list[tuple[int, int]]:
    """Returns where the documents of a row begin and end."""
    length = len(row["input_ids"])
    if "document_ids" not in row:
        return [(0, length)]
    return list(pairwise([0, *(np.flatnonzero(np.diff(row["document_ids"])) + 1).tolist(), length]))


def _runs(flags: np.ndarray, offset: int) -> list[tuple[int, int]]:
    """Returns where the runs of True begin and end."""
    # Zeros at both sides, so that runs at the ends have edges, too
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(np.int8), [0]]))) + offset
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def ends_of_images(row: Row, seen: ImageInput) -> dict[int, int]:
    """Returns how many images a row has up to each place where one ends, by the positions of images up to there.

    Raises:
        DataError: it is not known which positions belong to which image.
    """
    places = int((row["input_ids"] < 0).sum())
    grids = [Grid(*grid) for grid in row[GRIDS].tolist() if any(grid)]
    ends = np.cumsum([0, *map(seen.positions, grids)]).tolist()
    if ends[-1] != places:
        message = (
            f"images of grids {[tuple(grid) for grid in grids]} take {ends[-1]} positions, and the row has {places}"
        )
        raise DataError(f"{message}; which of them a question has cannot be told")
    return {end: number for number, end in enumerate(ends)}
