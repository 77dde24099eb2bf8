"""Rows of documents with images, decoded when they are read."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cached_property

import numpy as np
from attrs import define, field, frozen

from forge_core.contracts.errors import DataError
from forge_kit.data.cache import CachedFolder, digest_of
from forge_plugin_images.documents import ImageDocuments
from forge_plugin_images.image_file import BrokenImage
from forge_plugin_images.index import entries_of
from forge_plugin_images.plan import Plan, alone, stored_plan
from forge_plugin_images.records import Record
from forge_plugin_images.rows import Document, RowFormat

logger = logging.getLogger(__name__)

NAMED = 4
"""Upper bound of the documents or images that a message names."""


@define
class Tolerance:
    """Which share of documents that cannot be read is left out. Each process counts those that it meets."""

    skips: bool
    """Whether they are left out at all."""
    share: float
    documents: int
    _met: set[int] = field(factory=set)

    def leave_out(self, number: int, place: str, error: BrokenImage) -> None:
        """Note a document that cannot be read; raises `DataError` if it must not be left out."""
        if not self.skips:
            raise DataError(f'{place}: {error}; repair or remove it, or set unreadable = "skip"') from error
        # Every epoch meets the same documents: each is named and counted once.
        if number not in self._met:
            logger.warning("%s is left out: %s", place, error)
        self._met.add(number)
        # A share of all documents: of the documents met so far, one broken file at the start would be too many
        if len(self._met) > self.share * self.documents:
            count = f"{len(self._met)} of {self.documents} documents cannot be read"
            raise DataError(
                f"{count}, more than max_unreadable = {self.share}; the last is {place}: {error}"
            ) from error


@frozen
class ChosenDocuments:
    """Documents of an index that are trained on, or held out, and how many are left out."""

    numbers: np.ndarray
    """(documents,) int64, ascending."""
    unlearned: int = 0
    """Documents without a label."""
    too_long: int = 0
    cut: int = 0
    broken: int = 0

    def describe(self) -> str:
        """Returns a text with the numbers of documents that were cut or left out."""
        notes = {
            "cut": self.cut,
            "too long and left out": self.too_long,
            "that cannot be read and left out": self.broken,
            "without anything to learn and left out": self.unlearned,
        }
        return "".join(f", {count:,} {note}" for note, count in notes.items() if count)


class ImageRows:
    """See `forge_core.contracts.data.Dataset`. A pickled copy maps the index by itself."""

    def __init__(
        self,
        documents: ImageDocuments,
        index: CachedFolder,
        selection: ChosenDocuments,
        rows: RowFormat,
        tolerance: Tolerance,
        held_out: ImageRows | None = None,
    ) -> None:
        self._documents, self._index, self._selection, self._rows = documents, index, selection, rows
        self._tolerance = tolerance
        self.held_out: ImageRows | None = held_out
        # Of the plan's inputs and not of the plan, which is only made when a row is read
        numbers = digest_of(selection.numbers.tolist())
        self._identity = digest_of(index.identity("rows"), rows.keeps_apart, list(rows.room), numbers)
        self.bytes_per_token: float | None = self._bytes_per_token() if held_out is None else held_out.bytes_per_token

    @cached_property
    def _plan(self) -> Plan:
        if not self._rows.keeps_apart:
            # Without `document_ids`, documents of one row would attend to each other.
            return alone(self._selection.numbers)
        return stored_plan(self._index.identity("rows"), self._selection.numbers, self._entries, self._rows.room)

    @property
    def _entries(self) -> np.ndarray:
        return entries_of(self._index.path)

    def __len__(self) -> int:
        return len(self._plan)

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        documents: list[Document] = []
        patches: list[np.ndarray] = []
        numbers = self._plan[range(len(self))[index]]
        for number in numbers:
            try:
                document, own = self._documents.read(number)
            except BrokenImage as error:
                self._tolerance.leave_out(number, self._place(number), error)
                continue
            # Before the document enters the row, which has only the planned room for it
            self._check_unchanged(number, document)
            documents.append(document)
            patches.extend(own)
        return self._rows.row(documents, patches, len(numbers) - len(documents))

    def records(self, index: int) -> list[Record]:
        """Returns what the files say of a row: the record of each of its documents, in order."""
        return [self._documents.record(number) for number in self._plan[range(len(self))[index]]]

    def where(self, index: int) -> str:
        """See `HasLocation`."""
        numbers = self._plan[range(len(self))[index]]
        more = [f"{len(numbers) - NAMED} more"] if len(numbers) > NAMED else []
        return "; ".join([*map(self._place, numbers[:NAMED]), *more])

    def cost(self, index: int) -> int:
        """Returns the patches of a row."""
        return int(self._entries["patches"][self._plan[range(len(self))[index]]].sum())

    def describe(self) -> str:
        """See `HasDescription`."""
        chosen = self._entries[self._selection.numbers]
        filled = (
            f"{chosen[name].sum(dtype=np.int64) / max(1, room * len(self)):.1%} of {name}"
            # The third kind of room, images, is not part of the line.
            for name, room in zip(("positions", "patches"), self._rows.room, strict=False)
        )
        own = (
            f"{len(chosen):,} documents in {len(self):,} rows ({', '.join(filled)} filled){self._selection.describe()}"
        )
        return own if self.held_out is None else f"{own}; held out: {self.held_out.describe()}"

    def identity(self) -> str:
        """See `HasIdentity`."""
        return self._identity

    def _place(self, number: int) -> str:
        return self._documents.record(number).place

    def _check_unchanged(self, number: int, document: Document) -> None:
        """Stop if files of images were exchanged by others of another size: they may not fit into the planned row."""
        entry = self._entries[number]
        if document.needs != (entry["positions"], entry["patches"], entry["images"]):
            record = self._documents.record(number)
            hint = f"touch {record.file}, so that they are measured again, and start again"
            raise DataError(f"{record.place}: its images have other sizes than when they were measured; {hint}")

    def _bytes_per_token(self) -> float | None:
        chosen = self._entries[self._selection.numbers]
        # Not those with cut text, whose labels stand for an unknown number of bytes
        known = chosen[chosen["text_bytes"] > 0]
        labels = int(known["labels"].sum(dtype=np.int64))
        return int(known["text_bytes"].sum(dtype=np.int64)) / labels if labels else None
