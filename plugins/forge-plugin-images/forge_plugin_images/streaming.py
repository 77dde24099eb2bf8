"""Documents with images that are read during training, from a streamed Hugging Face dataset. Needs its plugin.

Rows of the dataset are dealt to lanes as texts are (`forge_plugin_huggingface.stream`); the documents of a lane fill
its rows of the batch one after the other.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from attrs import define, evolve, frozen

from forge_core.contracts.data import IGNORED_LABEL
from forge_core.contracts.errors import DataError, JobError, Problem
from forge_kit.data.cache import cached_folder, digest_of
from forge_kit.tools.rank_zero import from_rank0
from forge_plugin_huggingface.part import SplitPart
from forge_plugin_huggingface.rows import SourceRow, StreamRows, stream_rows
from forge_plugin_huggingface.source import DatasetSource, DescribedSource, Origin
from forge_plugin_huggingface.stream import LaneReader
from forge_plugin_images.dataset_rows import all_rows, row_format
from forge_plugin_images.documents import ImageDocuments, Measured
from forge_plugin_images.image_file import BrokenImage, ImageFile
from forge_plugin_images.records import Record, embedded_image, file_at
from forge_plugin_images.rows import Needs, RowFormat
from forge_plugin_images.tables import Table, describe_table

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_plugin_images.dataset import ImageRows
    from forge_plugin_images.stream_dataset import StreamDataset

logger = logging.getLogger(__name__)

FORMAT = 1
"""Part of the key of held-out rows: increase it when the same rows are kept differently."""
PLACES = "places.json"
"""File with the places of held-out rows in their dataset."""
JUDGED_FROM = 1000
"""Documents that a process reads before their share of broken ones is more than chance; taken as read before that."""


@frozen
class StreamedRecords:
    """Rows of a stream as records, which cannot be had by number. See `ImageSource`."""

    rows: StreamRows
    folder: str
    """Where relative paths of images start."""

    @classmethod
    def open(cls, keys: StreamDataset, source: DatasetSource, split: str, lanes: int = 1) -> StreamedRecords:
        """Open a split; raises `JobError` if it lacks a key that the job names."""
        name, columns, dataset = f"{keys.path!r}, split {split!r}", keys.columns(), source.stream(split)
        there = dataset.column_names
        for setting, key in columns.items() if there is not None else ():
            if key not in there and setting not in keys.optional_columns:
                listed = ", ".join(map(repr, there)) or "none"
                raise JobError([Problem(setting, f"{name} has no column {key!r}, but {listed}; name one of those")])
        # Not decoded by `datasets`: images stay bytes, and their headers are all that is read at first.
        rows = stream_rows(dataset, list(dict.fromkeys(columns.values())), name, lanes, decode=False)
        return cls(rows, home_of(keys))

    def record(self, row: SourceRow) -> Record:
        """Returns a row as a record."""
        return Record(row.place, self.rows.name, row.values)

    def image(self, record: Record, value: Any) -> ImageFile:
        """See `ImageSource`."""
        found = embedded_image(record, value)
        return file_at(self.folder, found) if isinstance(found, str) else found

    def of(self, part: SplitPart) -> Iterator[Record]:
        """Yields the records of a part of its split, file by file."""
        files = (self.rows.read(file, wanted=part.has) for file in range(self.rows.files))
        return islice((self.record(row) for rows in files for _, row in rows), part.limit or None)


class Broken(NamedTuple):
    """A document whose image has no header that can be read."""

    place: str
    error: BrokenImage


class Read(NamedTuple):
    """A document as a lane has it: measured, not decoded."""

    place: str
    measured: Measured


@define
class StreamTolerance:
    """Which share of documents with broken images is left out, of those that a process has met."""

    skips: bool
    share: float
    _met: int = 0
    _broken: int = 0

    def meet(self, documents: int) -> None:
        """Count documents that are read."""
        self._met += documents

    def leave_out(self, broken: Broken) -> None:
        """Count a broken document; raises `DataError` if it must not be left out."""
        place, error = broken
        if not self.skips:
            raise DataError(f'{place}: {error}; repair or remove it, or set unreadable = "skip"') from error
        logger.warning("%s is left out: %s", place, error)
        self._broken += 1
        if self._broken > self.share * max(self._met, JUDGED_FROM):
            count = f"{self._broken} of {self._met} documents that this process has met cannot be read"
            message = f"{count}, more than max_unreadable = {self.share}; the last is {place}: {error}"
            raise DataError(message) from error


@define
class RecordReader:
    """Turns rows of the dataset into documents, by the headers of their images."""

    records: StreamedRecords
    documents: ImageDocuments
    room: Needs
    too_long: Literal["stop", "cut", "skip"]
    _has_warned: bool = False

    def encode(self, rows: Sequence[SourceRow]) -> list[Read | Broken | None]:
        """Returns the document of each row; None if there is nothing to learn from it, or it is too long and skipped.

        Raises:
            JobError: a row does not match the job, or is too long and must not be.
        """
        return [self._document(self.records.record(row)) for row in rows]

    def _document(self, record: Record) -> Read | Broken | None:
        try:
            # Frames are drawn by the place, which is the same in every process and after a continued run.
            measured = self.documents.measure_record(record, record.place)
        except BrokenImage as error:
            return Broken(record.place, error)
        if (measured.document.labels == IGNORED_LABEL).all():
            return None
        needs = measured.document.needs
        if all(need <= most for need, most in zip(needs, self.room, strict=True)):
            return Read(record.place, measured)
        both = zip(needs._asdict().items(), self.room, strict=True)
        listed = ", ".join(f"{need} {name} (a row has {most})" for (name, need), most in both if need > most)
        if self.too_long == "stop":
            hint = 'make room in the model and train.seq_len, or set too_long to "cut" or "skip"'
            raise JobError(f"{record.place} has {listed}; {hint}")
        if not self._has_warned:
            # Once in a process: too long documents may be a large share of the data
            logger.warning("%s is left out: it has %s; others like it are not named", record.place, listed)
        self._has_warned = True
        return None


class ImageStream:
    """See `forge_core.contracts.data.Stream`: rows that the documents of a lane fill in order.

    If documents are kept apart, a row takes those that follow each other for as long as they fit; else each has a row.
    """

    is_packed = False

    def __init__(
        self,
        lanes: LaneReader[Read | Broken],
        documents: ImageDocuments,
        rows: RowFormat,
        tolerance: StreamTolerance,
        held_out: ImageRows | None = None,
    ) -> None:
        self._reader, self.lanes, self._documents = lanes, lanes.lanes, documents
        self._rows, self._tolerance, self.held_out = rows, tolerance, held_out
        self.bytes_per_token = None if held_out is None else held_out.bytes_per_token

    def read(
        self, lane: int, position: Mapping[str, Any] | None
    ) -> Iterator[tuple[Mapping[str, np.ndarray], Mapping[str, Any]]]:
        """See `Stream.read`. A position is the position of the document that begins the next row."""
        filling: list[Read] = []
        broken = 0
        for found, place in self._reader.read(lane, position):
            self._tolerance.meet(1)
            if isinstance(found, Broken):
                # Counted in the row that is being filled: a run that continues at the next row does not meet it again.
                self._tolerance.leave_out(found)
                broken += 1
                continue
            if filling and not self._fits([*filling, found]):
                yield self._row(filling, broken), place
                filling, broken = [], 0
            filling.append(found)

    def _fits(self, documents: Sequence[Read]) -> bool:
        needs = np.sum([read.measured.document.needs for read in documents], axis=0)
        return self._rows.keeps_apart and bool((needs <= self._rows.room).all())

    def _row(self, filling: Sequence[Read], broken: int) -> Mapping[str, np.ndarray]:
        documents, patches = [], []
        for place, measured in filling:
            try:
                patches.extend(self._documents.patches(measured))
            except BrokenImage as error:
                self._tolerance.leave_out(Broken(place, error))
                broken += 1
                continue
            documents.append(measured.document)
        return self._rows.row(documents, patches, broken)


def image_stream(keys: StreamDataset, context: BuildContext) -> ImageStream:
    """Returns the stream of an image dataset, with its held-out rows.

    Raises:
        JobError: the data cannot be read, or does not match the job's keys.
    """
    job, part = context.job, held_out_part(keys)
    splits = {keys.split, *(() if part is None else (part.split,))}
    # Collective: rank 0 alone contacts the hub, and all ranks must reach this call
    data = from_rank0(context, lambda: DescribedSource.of(origin_of(keys), splits, [keys.split]))
    lanes = keys.lanes or job.train.global_batch_size
    records = StreamedRecords.open(keys, data.source, keys.split, lanes)
    documents = keys.documents_of(context, records)
    rows = row_format(context, documents)
    tolerance = StreamTolerance(keys.skips_unreadable, keys.max_unreadable)
    reader: LaneReader[Read | Broken] = LaneReader(
        records.rows,
        RecordReader(records, documents, rows.room, keys.too_long).encode,
        data=data.fingerprints[keys.split],
        lanes=lanes,
        shuffle=keys.shuffle,
        seed=job.job.seed if job.data.seed is None else job.data.seed,
        held_out_every=keys.held_out_every,
    )
    held_out = None
    if part is not None:
        table = held_out_records(keys, data, part)
        # From the cache and not from the stream: evaluations read the same rows again.
        held_out = all_rows(keys, context, keys.documents_of(context, table, all_held_out=True))
    return ImageStream(reader, documents, rows, tolerance, held_out)


def origin_of(keys: StreamDataset) -> Origin:
    """Returns the keys that locate the data, as of the dataset `huggingface`."""
    return Origin(keys.path, keys.config, keys.revision, keys.data_files)


def held_out_part(keys: StreamDataset) -> SplitPart | None:
    """Returns the rows to evaluate on, if any."""
    if keys.held_out_split:
        return SplitPart(keys.held_out_split, limit=keys.held_out_documents)
    if keys.held_out_every:
        return SplitPart(keys.split, keys.held_out_every, is_held_out=True, limit=keys.held_out_documents)
    return None


def held_out_records(keys: StreamDataset, data: DescribedSource, part: SplitPart) -> Table:
    """Returns held-out rows, images included, which are read once and kept in the cache."""
    import datasets

    def make(folder: Path) -> Mapping[str, int]:
        records = StreamedRecords.open(keys, data.source, part.split)
        rows = list(records.of(part))
        if not rows:
            key = "held_out_split" if keys.held_out_split else "held_out_every"
            raise JobError([Problem(key, f"{records.rows.name} has no rows to hold out")])
        datasets.Dataset.from_list([dict(row.values) for row in rows]).save_to_disk(str(folder))
        # Rows in the cache are numbered from 0, and errors and draws of frames need their places in the dataset
        (folder / PLACES).write_text(json.dumps([row.place for row in rows]), "utf-8")
        return {"rows": len(rows)}

    columns = sorted(keys.columns().values())
    key = digest_of(FORMAT, data.fingerprints[part.split], part.key(), columns)
    stored = cached_folder("image-held-out", key, make)
    places = json.loads((stored.path / PLACES).read_text("utf-8"))
    data, path = describe_table((), str(stored.path), "train"), str(stored.path)
    return evolve(Table.open(data, path, "train", home_of(keys) or path), places=places)


def home_of(keys: StreamDataset) -> str:
    """Returns the folder where relative paths of images start; empty: the working directory."""
    own = str(Path(keys.path))
    return keys.folder or (own if os.path.isdir(own) else "")


def training_records(keys: StreamDataset) -> Iterator[Record]:
    """Yields the records of a stream that are not held out, each once."""
    records = StreamedRecords.open(keys, origin_of(keys).open(), keys.split)
    return records.of(SplitPart(keys.split, keys.held_out_every))
