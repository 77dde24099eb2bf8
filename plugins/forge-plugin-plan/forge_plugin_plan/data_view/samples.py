"""A sample as a reader sees it: runs of learned and ignored tokens, boundaries of documents, images, padding.

S: positions of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
from attrs import frozen

from forge_core.contracts.data import IGNORED_LABEL, Batch

ENTRIES = ("input_ids", "labels", "document_ids", "positions", "sources", "slots")
"""Entries of a batch that are shown as text, or not at all; of all others, the shape is shown."""
GRIDS, TILE_ROW = "grids", 1000
"""Entry (N, 3) of samples with images: frames, rows and columns of each in patches; zeros where there is none."""


class Token(NamedTuple):
    """One token of a sample."""

    id: int
    """Its id; below 0 at positions of images, which are no token."""
    learned: bool
    """Whether it is the label of the position before it."""
    document: int
    """Number of its document within the sample, from 0."""
    position: int
    """Where it stands in the sample; -1: it is a label only."""


@frozen(kw_only=True)
class Stretch:
    """Neighbouring tokens of one document that are shown alike."""

    kind: str
    """`text`, `image` or `padding`."""
    learned: bool
    document: int
    ids: Sequence[int]


@frozen(kw_only=True)
class Fill:
    """Counts of positions."""

    positions: int = 0
    learned: int = 0
    """Positions with a label."""
    padding: int = 0
    """Positions after the last document of a sequence: end-of-text without labels."""

    @property
    def ignored(self) -> int:
        """Positions without a label, padding included."""
        return self.positions - self.learned

    def __add__(self, other: Fill) -> Fill:
        return Fill(
            positions=self.positions + other.positions,
            learned=self.learned + other.learned,
            padding=self.padding + other.padding,
        )


@frozen(kw_only=True)
class Sample:
    """One sequence, as training reads it."""

    inputs: np.ndarray
    """(S,) int64."""
    labels: np.ndarray
    """(S,) int64, `IGNORED_LABEL` where ignored."""
    documents: np.ndarray | None
    """(S,) int64: `document_ids`, if the sample has them."""
    grids: Sequence[tuple[int, int, int]]
    """Frames, rows and columns of each image, in patches."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the entries that are not tokens."""
    end_of_text: int | None
    """Id that ends documents and fills what no document takes; None: unknown, then no padding is recognised."""
    starts: np.ndarray | None = None
    """Positions at which a document begins, the first aside, of a row without `document_ids`; None: unknown."""

    @classmethod
    def of(cls, batch: Batch, end_of_text: int | None, starts: np.ndarray | None = None) -> Sample:
        """Take the sample of a batch of one row. A row that may have images is one document."""
        rows = {name: tensor[0].numpy() for name, tensor in batch.items()}
        # Rows of zeros fill the entry where a sample has fewer images than it has room for
        grids = [(int(f), int(r), int(c)) for f, r, c in rows.get(GRIDS, ()) if f]
        return cls(
            inputs=rows["input_ids"],
            labels=rows["labels"],
            documents=rows.get("document_ids"),
            grids=grids,
            shapes={name: tuple(row.shape) for name, row in rows.items() if name not in ENTRIES},
            end_of_text=end_of_text,
            starts=np.empty(0, np.int64) if GRIDS in rows else starts,
        )

    @property
    def padding(self) -> int:
        """Positions at the end that hold no document."""
        # If end_of_text is None, every position differs from it, and none counts as padding
        filled = np.flatnonzero((self.inputs != self.end_of_text) | (self.labels != IGNORED_LABEL))
        padding = len(self.inputs) - (int(filled[-1]) + 1 if len(filled) else 0)
        if self.documents is None:
            return padding if padding > 1 else 0  # one may be the end of the last document, and the next not learned
        # Padding is a separate document: an end-of-text before it ends a real document, and its label was left out.
        own = int((self.documents == self.documents[-1]).sum())
        return own if own <= padding else 0

    @property
    def fill(self) -> Fill:
        """Counts of its positions."""
        learned = int((self.labels != IGNORED_LABEL).sum())
        return Fill(positions=len(self.inputs), learned=learned, padding=self.padding)

    def shifted(self) -> bool:
        """Whether each label is the next input, wherever the next position is of the same document."""
        inside = self.labels[:-1] != IGNORED_LABEL
        if self.documents is not None:
            inside &= self.documents[:-1] == self.documents[1:]
        return bool((self.labels[:-1] == self.inputs[1:])[inside].all())

    def tokens(self) -> list[Token]:
        """Returns inputs without padding, and labels that are no input: the last one, and those that end a document.

        Where documents are neither numbered nor known, each ends with end-of-text, which the template of a chat may
        write after each turn.
        """
        stop = len(self.inputs) - self.padding
        segments = self._segments(stop)
        if self.documents is not None:
            return [token for number, (a, b) in enumerate(segments) for token in self._segment(a, b, number)]
        if self.starts is not None:
            whole = [*self._segment(0, stop, 0)]
            # The last label is no input; it comes after the last position
            places = [stop if token.position < 0 else token.position for token in whole]
            numbers = np.searchsorted(self.starts, places, "right").tolist()
            return [token._replace(document=number) for token, number in zip(whole, numbers, strict=True)]
        tokens, document = [], 0
        for token in self._segment(0, stop, 0):
            tokens.append(token._replace(document=document))
            # After the token, as an end-of-text belongs to the document that it ends
            document += token.id == self.end_of_text
        return tokens

    def _segments(self, stop: int) -> list[tuple[int, int]]:
        if self.documents is None:
            return [(0, stop)]
        changes = np.flatnonzero(np.diff(self.documents[:stop])) + 1
        return [(a, b) for a, b in pairwise([0, *changes.tolist(), stop]) if a < b]

    def _segment(self, start: int, stop: int, number: int) -> Iterator[Token]:
        """Yields the tokens at positions [start, stop), and the last label."""
        for position in range(start, stop):
            # The label of a position is the token after it, so a token is learned if the position before has a label.
            learned = position > start and self.labels[position - 1] != IGNORED_LABEL
            yield Token(int(self.inputs[position]), bool(learned), number, position)
        if stop > start and self.labels[stop - 1] != IGNORED_LABEL:
            yield Token(int(self.labels[stop - 1]), True, number, -1)

    def runs(self, most: int = 0) -> tuple[list[Stretch], list[Token]]:
        """Returns the first `most` tokens (0: all) in runs, padding as the last of them, and the tokens left out."""
        tokens = self.tokens()
        shown, rest = (tokens[:most], tokens[most:]) if most else (tokens, [])
        runs = [
            Stretch(kind="image" if image else "text", learned=learned, document=document, ids=[t.id for t in group])
            for (image, learned, document), group in groupby(shown, lambda t: (t.id < 0, t.learned, t.document))
        ]
        if self.padding and not rest:
            filler = self.inputs[len(self.inputs) - self.padding :].tolist()
            runs.append(Stretch(kind="padding", learned=False, document=-1, ids=filler))
        return runs, rest


def image_names(runs: Sequence[Stretch], grids: Sequence[tuple[int, int, int]]) -> list[str]:
    """Returns a placeholder for each run of positions of images, in order.

    Where each run is one image, it has the size of its grid; images that follow each other without a token between are
    one run.
    """
    image_runs = [run for run in runs if run.kind == "image"]
    names = []
    for number, run in enumerate(image_runs):
        size = f", {grid_text(grids[number])} patches" if len(image_runs) == len(grids) else ""
        names.append(f"[image{size}: {len(run.ids)} positions]")
    return names


def grid_text(grid: tuple[int, int, int]) -> str:
    """`16 x 24`, with the frames before them if there are several; of an image in tiles that are joined, those too."""
    frames, rows, columns = grid
    if frames < 0:
        # Images in joined tiles have -(tile rows x 1000 + tile columns) in place of the frames
        tile_rows, tile_columns = divmod(-frames, TILE_ROW)
        return f"{rows} x {columns} of {tile_rows} x {tile_columns} tiles"
    return f"{rows} x {columns}" if frames == 1 else f"{frames} x {rows} x {columns}"
