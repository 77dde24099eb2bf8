"""The data of a job, built as training builds it: tokenizer, sequences of each source, and their order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import attrs
import numpy as np
import torch
from attrs import frozen

from forge_core.checkpoint.run_folder import run_folder
from forge_core.config.mixture import source_names
from forge_core.contracts.components import Component
from forge_core.contracts.contexts import BuildContext
from forge_core.contracts.data import Batch, Dataset, DataSource, Documents, SampleRow, Stream, Tokenizer
from forge_core.contracts.errors import JobError
from forge_core.contracts.layout import Layout
from forge_core.data.order import check_supply, expected_draws, sample_order, sizes_of
from forge_core.data.packing import WindowPacking
from forge_core.data.reading import RowReader
from forge_core.engine.build import build_datasets, build_tokenizer
from forge_core.job import Job
from forge_core.parallel.initialise import bare_context
from forge_core.plugins.catalog import Catalog
from forge_kit.data.document_streams import DocumentStream, StreamWindows
from forge_kit.data.origins import HasOrigins, HasSpans, Origin


@frozen
class Passage:
    """What a row has of a document."""

    position: int
    """Where it begins in the row."""
    number: int
    """Number of the document in its source, from 0."""
    token: int
    """Where it begins in the document."""
    tokens: int
    """How many there are, the last of a row, which is a label alone, included."""
    origin: Origin | None
    """Where the document comes from; None: unknown."""

    def as_json(self) -> dict[str, Any]:
        """Returns it as plain types."""
        origin = self.origin
        known = {"file": origin.file, "line": origin.line, "kept": {**origin.fields}} if origin else None
        return {
            "position": self.position,
            "tokens": self.tokens,
            "document": self.number,
            "from_token": self.token,
            "origin": known,
        }


@frozen(kw_only=True)
class JobData:
    """Tokenizer, sources and order of a job."""

    job: Job
    catalog: Catalog
    tokenizer: Tokenizer | None
    datasets: Sequence[Dataset | Stream]
    documents: Mapping[int, Documents]
    """The documents that were packed, by the number of the source; none for streams and finished sequences."""
    built: Mapping[int, DataSource | DocumentStream]
    """What the component of each source built, before it was packed."""

    @property
    def names(self) -> list[str]:
        """Name of each source."""
        return source_names(self.job)

    @property
    def sizes(self) -> list[int | None]:
        """Sequences of each source; None for streams."""
        return sizes_of(self.datasets)

    def draws(self) -> list[float]:
        """Returns the sequences that the whole run takes from each source, to within a few."""
        return expected_draws(self.job, self.sizes)

    def rows(self, step: int) -> Iterator[SampleRow]:
        """Yields the rows of the run in the order of training, from the first of `step` (from 1) to the last."""
        order = sample_order(self.job, self.sizes)
        order.advance(self.job.train.sample_after(step - 1))
        for number in range(step, self.job.train.steps + 1):
            for slot, (source, sequence) in enumerate(islice(order, self.job.train.batch_size(number))):
                yield SampleRow(slot, source, sequence)

    def read(self, step: int, count: int) -> Iterator[tuple[SampleRow, str, Batch]]:
        """Yields `count` rows from the first of `step` on: the row, where it comes from, and its entries (1, …).

        Fewer rows if the run ends before. A stream can only be read in order: its rows of all earlier steps are read
        as well.

        Raises:
            DataError: a sample cannot be read.
        """
        reader = RowReader(self.job, self.datasets, self.names, {})
        if reader.has_lanes:
            for row in islice(self.rows(1), self.job.train.sample_after(step - 1)):
                if isinstance(self.datasets[row.source], Stream):
                    # Only to bring the lane to this place
                    reader.read([row])
        for row in islice(self.rows(step), count):
            yield row, reader.describe(row), reader.read([row]).batch

    def starts(self, row: SampleRow) -> np.ndarray | None:
        """Returns the positions of a row at which its documents begin, the first aside; None: they are not known."""
        documents = self.documents.get(row.source)
        ends = None if documents is None else ends_of(documents)
        # Windows cut the concatenated documents at multiples of seq_len; other packings may reorder them
        if ends is None or not isinstance(self.job.data.packing, WindowPacking):
            return None
        first, length = row.number * self.job.train.seq_len, self.job.train.seq_len
        # Up to and including the end of the row: the last label may begin the next document
        inside = slice(*np.searchsorted(ends, [first, first + length], "right"))
        return np.asarray(ends[inside]) - first

    def spans(self, row: SampleRow) -> Sequence[tuple[int, int]] | None:
        """Returns the tokens [start, stop) of its documents that a row is made of, in order; None: it is not known."""
        dataset = self.datasets[row.source]
        if row.source not in self.documents:
            return None
        if isinstance(dataset, HasSpans):
            return dataset.spans(row.number)
        if not isinstance(self.job.data.packing, WindowPacking):
            return None
        first = row.number * self.job.train.seq_len
        return [(first, first + self.job.train.seq_len + 1)]

    def passages(self, row: SampleRow) -> list[Passage]:
        """Returns the documents of which a row is made, in order; none where that is not known.

        Raises:
            DataError: the list of where documents come from is damaged.
        """
        spans = self.spans(row)
        documents = self.documents.get(row.source)
        ends = None if documents is None else ends_of(documents)
        if not spans or ends is None:
            return []
        passages: list[Passage] = []
        position = 0
        for start, stop in spans:
            # From the document of the first token to the document of the last
            first, last = np.searchsorted(ends, [start, min(stop, int(ends[-1])) - 1], side="right")
            for number in range(int(first), int(last) + 1):
                begin = int(ends[number - 1]) if number else 0
                inside = max(start, begin)
                length = min(stop, int(ends[number])) - inside
                passages.append(Passage(position + inside - start, number, inside - begin, length, None))
            # The last token of a span is a label alone
            position += stop - start - 1
        if not isinstance(documents, HasOrigins):
            return passages
        numbers = np.unique([passage.number for passage in passages])
        origins = dict(zip(numbers.tolist(), documents.origins(numbers), strict=True))
        return [attrs.evolve(passage, origin=origins[passage.number]) for passage in passages]

    def passages_of(self, step: int) -> Iterator[tuple[int, Sequence[Passage]]]:
        """Yields the number and the documents of each sample of a step (from 1). No token is read.

        Raises:
            DataError: the list of where documents come from is damaged.
        """
        for number, row in enumerate(islice(self.rows(step), self.job.train.batch_size(step))):
            yield number, self.passages(row)

    def sequence(self, number: int) -> tuple[SampleRow, str, Batch]:
        """Returns the sequence of this number (from 0) in the run, as `read` yields it, and reads no other.

        A lane of a stream can only be read in order: all of its earlier sequences are read as well.

        Raises:
            DataError: a sequence cannot be read.
        """
        reader = RowReader(self.job, self.datasets, self.names, {})
        step = self.job.train.steps_until(number + 1)
        row = next(islice(self.rows(step), number - self.job.train.sample_after(step - 1), None))
        lane = reader.describe(row)  # rows of one lane have the same description
        if isinstance(self.datasets[row.source], Stream):
            for earlier in islice(self.rows(1), number):
                if earlier.source == row.source and reader.describe(earlier) == lane:
                    reader.read([earlier])
        return row, lane, reader.read([row]).batch


def ends_of(documents: Documents) -> np.ndarray | None:
    """Where documents end; None where it is not known, as in files of ids without an index."""
    try:
        return documents.ends()
    except JobError:
        return None


class _RecordingBuilder:
    """Builds as the job's plugins do, and keeps the documents that each dataset was packed from."""

    def __init__(self, context: BuildContext) -> None:
        self._plugins, self._packing = context.plugins, context.job.data.packing
        self.catalog: Any = context.plugins.catalog
        self._sources = context.job.data.sources
        self.packed: list[tuple[Any, Documents]] = []
        self.built: dict[int, DataSource | DocumentStream] = {}

    def build(self, component: Component[Any], context: BuildContext, **inputs: Any) -> Any:
        built = self._plugins.build(component, context, **inputs)
        # By identity, as another component of the job may be equal
        if component is self._packing:
            self.packed.append((built, inputs["documents"]))
        # A component packs a stream of documents itself
        before = built.stream if isinstance(built, StreamWindows) else built
        self.built |= {number: before for number, source in enumerate(self._sources) if source is component}
        return built


def open_data(job: Job, catalog: Catalog) -> JobData:
    """Build tokenizer and sources of a job as its training would, with the tokenizer that its run folder keeps if any.

    Raises:
        JobError: the data cannot be built, or do not last as long as the run.
    """
    # The order depends on no layout, and stages take no part in reading data: one process stands for all ranks.
    job = attrs.evolve(job, parallel={})
    context: BuildContext = bare_context(job, Layout(), catalog, torch.device("cpu"))
    context = attrs.evolve(context, folder=run_folder(job))
    builder = _RecordingBuilder(context)
    context = attrs.evolve(context, plugins=builder)
    tokenizer = build_tokenizer(job, context)
    datasets = build_datasets(job, attrs.evolve(context, tokenizer=tokenizer))
    # As training does, so that no sample is shown of a job that training refuses
    check_supply(job, sizes_of(datasets))
    sources = range(len(datasets))
    # By identity: a dataset that was derived from a packed one has no known documents
    documents = {
        source: documents for dataset, documents in builder.packed for source in sources if datasets[source] is dataset
    }
    return JobData(
        job=job, catalog=catalog, tokenizer=tokenizer, datasets=datasets, documents=documents, built=builder.built
    )
