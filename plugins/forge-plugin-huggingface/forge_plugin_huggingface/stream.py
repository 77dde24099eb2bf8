"""A dataset that is read during training, in lanes over its files.

L lanes share F files such that no row is in two lanes: with g = gcd(F, L), lane l reads the files that are l modulo g,
and the L / g lanes with the same files take turns at their rows. A position names file and row, independent of the
state format of any version of `datasets`; rows before it are skipped in blocks without decoding them.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import attrs
import numpy as np
from attrs import evolve, frozen

from forge_core.contracts.errors import JobError
from forge_core.data.order import Permutation
from forge_kit.data.document_streams import StreamedDocument
from forge_plugin_huggingface.counts import RowCounts
from forge_plugin_huggingface.encoding import Encoded, Encoder
from forge_plugin_huggingface.rows import SourceRow, StreamRows

if TYPE_CHECKING:
    from forge_core.contracts.data import Documents

logger = logging.getLogger(__name__)

T = TypeVar("T")

ENCODED_ROWS = 16
"""Rows that a lane encodes at once."""
ROWS_WITHOUT_DOCUMENT = 2000
"""Rows after which a stream of chats or completions ends the run if none of them has anything to learn."""


class Share(NamedTuple):
    """The rows of a lane."""

    files: range
    lanes: int
    """Number of lanes that read these files."""
    turn: int
    """Number of this lane among them."""

    @classmethod
    def of(cls, lane: int, lanes: int, files: int) -> Share:
        """Returns the share of one lane: see the module's docstring."""
        groups = math.gcd(files, lanes)
        return cls(range(lane % groups, files, groups), lanes // groups, lane // groups)

    def has(self, row: int, file: int, every: int) -> bool:
        """Whether this lane reads a row. `every`: every n-th row is held out (0: none)."""
        if every and row % every == 0:
            return False
        # Counts the rows that are not held out, so that turns are equally long with every n-th row left out
        number = row - row // every - 1 if every else row
        # With the number of the file, so that one lane does not read the first row of every file
        return (number + file) % self.lanes == self.turn


@frozen
class LanePosition:
    """Position of a lane: before a row of a block."""

    epoch: int = 0
    file: int = 0
    """Index of the lane's file, in this epoch's order, in which the block begins."""
    row: int = 0
    """First row of the block in that file."""
    block: int = 0
    """Number of the block in the epoch."""
    index: int = 0
    """Index of the next row in the block's order."""
    size: int = 0
    """Rows of the block; 0 before the first block of an epoch."""
    digest: str = ""
    """BLAKE2 of the block's first row."""


class LaneStream:
    """See `forge_kit.data.document_streams.DocumentStream`."""

    def __init__(
        self,
        lanes: LaneReader[Encoded],
        end_of_text: int,
        held_out: Documents | None = None,
        counts: RowCounts | None = None,
    ) -> None:
        """Read the rows of lanes as documents, each ended by `end_of_text`; `counts` are of the rows read so far."""
        self._reader, self.lanes, self._end_of_text, self.held_out = lanes, lanes.lanes, end_of_text, held_out
        self._counts = counts

    def describe(self) -> str:
        """Returns the counts of the rows that this process has read; empty before the first one."""
        counts = self._counts
        return f"of {counts.rows:,} rows that were read: {counts.describe()}" if counts and counts.rows else ""

    def read(self, lane: int, position: Mapping[str, Any] | None) -> Iterator[StreamedDocument]:
        """Yields the documents of a lane, epoch after epoch; raises as `LaneReader.read`."""
        for document, place in self._reader.read(lane, position):
            yield _finished(document, self._end_of_text, place)


class CountingEncoder:
    """Encodes rows of a stream and counts them. Data workers have a copy each."""

    def __init__(self, encoder: Encoder, name: str) -> None:
        self._encoder, self._name, self.counts = encoder, name, RowCounts()

    def __call__(self, rows: Sequence[SourceRow]) -> list[Encoded | None]:
        """Returns the document of each row, None for rows that are left out.

        Raises:
            JobError: none of the first `ROWS_WITHOUT_DOCUMENT` rows has a document of which a part is learned.
        """
        encoded = self._encoder.encode(rows)
        counts = self.counts
        was_whole = not (counts.too_long or counts.cut)
        for row, document in zip(rows, encoded, strict=True):
            counts.add(document)
            if was_whole and (counts.too_long or counts.cut):
                was_whole = False
                what = "truncated" if counts.cut else "left out"
                logger.warning("%s is longer than train.seq_len, and is %s, as others will be", row.place, what)
        if self._encoder.has_mask and not counts.documents and counts.rows >= ROWS_WITHOUT_DOCUMENT:
            message = f"none of the first {counts.rows:,} rows has {self._encoder.learns}{counts.reason()}"
            raise JobError(f"{self._name}: {message}; `forge-run data` shows the learned tokens")
        return [document if isinstance(document, Encoded) else None for document in encoded]


class LaneReader(Generic[T]):
    """Reads the rows of files in lanes, each continued from any position, whatever is made of the rows."""

    def __init__(
        self,
        rows: StreamRows,
        encode: Callable[[Sequence[SourceRow]], Iterable[T | None]],
        *,
        data: str,
        lanes: int,
        shuffle: int = 0,
        seed: int = 0,
        held_out_every: int = 0,
    ) -> None:
        """Set it up; nothing is read.

        Args:
            rows: the files.
            encode: returns what each row is to be read as; None: the row is left out.
            data: fingerprint of the files.
            lanes: number of parallel streams that the files are dealt to.
            shuffle: rows of a block that are read together and then shuffled, as is the order of files; 0: in order.
            seed: seed of the shuffling.
            held_out_every: every n-th row of each file is left out, starting with the first; 0: none.
        """
        self._rows, self._encode = rows, encode
        self.lanes, self._shuffle, self._seed, self._every = lanes, shuffle, seed, held_out_every
        self._layout = {"files": rows.files, "lanes": lanes, "shuffle": shuffle, "held_out_every": held_out_every}
        self._data, self._has_warned = data, False
        self._warn_of_shared_files()

    def read(self, lane: int, position: Mapping[str, Any] | None) -> Iterator[tuple[T, Mapping[str, Any]]]:
        """Yields what the rows of a lane are read as, epoch after epoch, each with its position: plain JSON.

        Reading from that position (None: from the start) yields the same again, and what follows it.

        Raises:
            JobError: there are none, or the position is of another number of files or lanes, or of other blocks.
        """
        start = LanePosition() if position is None else self._place(position)
        while True:
            is_empty = True
            for document in self._epoch(lane, start):
                is_empty = False
                yield document
            # Only for a whole epoch: the rest of one may well be empty
            if is_empty and start == LanePosition(epoch=start.epoch):
                message = f"lane {lane} of {self.lanes} has no document in the {self._rows.files} files"
                hint = "lower `lanes`, or read the dataset as a whole (streaming = false)"
                raise JobError(f"{self._rows.name}: {message}; {hint}")
            start = LanePosition(epoch=start.epoch + 1)

    def _place(self, position: Mapping[str, Any]) -> LanePosition:
        if position["of"] != self._layout:
            change = f"was read with {_listed(position['of'])}, and now has {_listed(self._layout)}"
            message = "the position in the stream means nothing there. Restore what was, or start a new run"
            raise JobError(f"{self._rows.name} {change}: {message}")
        if position["data"] != self._data and not self._has_warned:
            self._has_warned = True
            message = "the files are not those that were read before, or lie elsewhere"
            logger.warning("%s: %s; reading continues at the same positions in them", self._rows.name, message)
        return LanePosition(**{name: position[name] for name in attrs.fields_dict(LanePosition) if name in position})

    def _epoch(self, lane: int, place: LanePosition) -> Iterator[tuple[T, Mapping[str, Any]]]:
        """Yields the rest of an epoch."""
        rows = self._rows_of(lane, place)
        block = list(islice(rows, self._shuffle or ENCODED_ROWS))
        if place.digest:
            self._check_same(block, place)
        while block:
            file, number, row = block[0]
            # A position names the start of its block: a resumed lane reads the whole block, to shuffle it identically.
            place = evolve(place, file=file, row=number, size=len(block), digest=_digest(row))
            yield from self._documents(lane, [row for *_, row in block], place)
            place = evolve(place, block=place.block + 1, index=0)
            block = list(islice(rows, self._shuffle or ENCODED_ROWS))

    def _check_same(self, block: Sequence[tuple[int, int, SourceRow]], place: LanePosition) -> None:
        """Raise unless the block at a saved position is the one read before: files may have lost rows."""
        same_start = block and (place.file, place.row, place.digest) == (*block[0][:2], _digest(block[0][2]))
        # The order of a shuffled block depends on its size; otherwise rows may have been added at its end.
        same_size = len(block) == place.size or (not self._shuffle and place.index < len(block))
        if not (same_start and same_size):
            message = f"file {place.file} of the lane is no longer what it was when the run was saved"
            change = f"rows were removed, added or changed at or before row {place.row}, or in its block"
            raise JobError(f"{self._rows.name}: {message}: {change}; restore the files, or start a new run")

    def _rows_of(self, lane: int, place: LanePosition) -> Iterator[tuple[int, int, SourceRow]]:
        """Yields the lane's rows from the block at `place` on: index of the file, number of the row, and the row."""
        share = Share.of(lane, self.lanes, self._rows.files)
        # By lane and epoch, so that a lane can start anywhere without replaying what came before
        order = self._order(len(share.files), f"{lane}:{place.epoch}")
        start = place.row
        for position in range(place.file, len(share.files)):
            file = share.files[order[position]]
            wanted = partial(share.has, every=self._every, file=file)
            for number, row in self._rows.read(file, start, wanted):
                yield position, number, row
            start = 0

    def _documents(
        self, lane: int, rows: Sequence[SourceRow], place: LanePosition
    ) -> Iterator[tuple[T, Mapping[str, Any]]]:
        """Yields the documents of a block, from `place.index` on."""
        order = self._order(len(rows), f"{lane}:{place.epoch}:{place.block}")
        for start in range(place.index, len(rows), ENCODED_ROWS):
            chosen = range(start, min(start + ENCODED_ROWS, len(rows)))
            encoded = self._encode([rows[order[index]] for index in chosen])
            for index, document in zip(chosen, encoded, strict=True):
                if document is not None:
                    yield document, attrs.asdict(evolve(place, index=index)) | {"of": self._layout, "data": self._data}

    def _order(self, size: int, key: str) -> Permutation | range:
        return Permutation(size, f"{self._seed}:{key}") if self._shuffle else range(size)

    def _warn_of_shared_files(self) -> None:
        times = Share.of(0, self.lanes, self._rows.files).lanes
        if times > 1:
            message = f"{self.lanes} lanes share its {self._rows.files} files, so that each file is read {times} times"
            logger.warning("%s: %s; once if `lanes` divides the number of files", self._rows.name, message)


def _digest(row: SourceRow) -> str:
    # Sorted, so that the order of columns does not matter
    return hashlib.blake2b(repr(sorted(row.values.items())).encode(), digest_size=8).hexdigest()


def _finished(document: Encoded, end_of_text: int, position: Mapping[str, Any]) -> StreamedDocument:
    return StreamedDocument(np.append(document.ids, end_of_text), document.learned_with_end(), position)


def _listed(layout: Mapping[str, int]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in layout.items())
