"""Reading rows of the global batch, and the loader that reads them ahead in one thread.

B: rows that are read together. torch is imported late, so that a job that names the loader is checked without it.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from attrs import frozen

from forge_core.contracts.components import LoaderComponent
from forge_core.contracts.data import (
    Batch,
    BatchField,
    Dataset,
    HasCost,
    HasLocation,
    LaneSamples,
    LoadedRows,
    Sample,
    SampleReader,
    SampleRow,
    Stream,
)
from forge_core.contracts.errors import DataError, Problem

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job

TOKEN_ENTRIES = ("input_ids", "labels", "document_ids", "positions")
UNITS_AHEAD = 3
"""Units of rows that are read ahead, the one being read included."""
LanePositions = Mapping[str, Mapping[str, Any]]
"""Source name -> lane -> position, plain JSON."""
# Token ids may be stored in any width, which may differ between sources.
DTYPES = dict.fromkeys(TOKEN_ENTRIES, "int64")


class RowReader:
    """Reads rows (see `SampleReader`); lanes stay open from one row to the next."""

    def __init__(
        self, job: Job, datasets: Sequence[Dataset | Stream], names: Sequence[str], positions: LanePositions
    ) -> None:
        """Reads global batches of `job`; lanes absent from `positions` start from the beginning."""
        self._datasets, self._names, self._start = datasets, names, positions
        self._rows, self._fields = job.train.global_batch_size, job.model.batch_fields(job)
        self._streams = {number: data for number, data in enumerate(datasets) if isinstance(data, Stream)}
        self.has_lanes = bool(self._streams)
        self.has_costs = any(isinstance(data, HasCost) for data in datasets)
        """Whether rows are in another order than they were drawn in."""
        self._lanes: dict[tuple[int, int], LaneSamples] = {}

    def read(self, rows: Sequence[SampleRow]) -> LoadedRows:
        samples, positions = [], {}
        for row in rows:
            try:
                if row.source in self._streams:
                    lane = self._lane(row)
                    sample, positions[row.source, lane] = next(self._open(row.source, lane))
                else:
                    sample = self._datasets[row.source][row.number]  # type: ignore[index]
            except Exception as error:
                failure = DataError(f"cannot read {self.describe(row)}: {type(error).__name__}: {error}")
                failure.add_note("".join(traceback.format_exception(error)))  # a pickled exception loses its traceback
                raise failure from error
            samples.append(sample)
        batch = collate(samples, self._fields, lambda number: self.describe(rows[number]))
        batch["sources"] = _stack([row.source for row in rows], "int64")
        batch["numbers"] = _stack([row.number for row in rows], "int64")
        if self.has_costs:
            batch["slots"] = _stack([row.slot for row in rows], "int64")
        return LoadedRows(batch, positions)

    def describe(self, row: SampleRow) -> str:
        """Returns `sequence 5 of source 'web' (FILE)`, or the lane of a stream, as its rows have no numbers."""
        name, dataset = self._names[row.source], self._datasets[row.source]
        if row.source in self._streams:
            return f"lane {self._lane(row)} of source {name!r}"
        location = f" ({dataset.where(row.number)})" if isinstance(dataset, HasLocation) else ""
        return f"sequence {row.number} of source {name!r}{location}"

    def _lane(self, row: SampleRow) -> int:
        # By the row of the global batch, which no layout changes: any rank and worker that reads it finds its lane.
        return row.slot * self._streams[row.source].lanes // self._rows

    def _open(self, source: int, lane: int) -> LaneSamples:
        if (source, lane) not in self._lanes:
            position = self._start.get(self._names[source], {}).get(str(lane))
            self._lanes[source, lane] = self._streams[source].read(lane, position)
        return self._lanes[source, lane]


def collate(
    samples: Sequence[Sample],
    fields: Mapping[str, BatchField] | None = None,
    describe: Callable[[int], str] = "row {} of the batch".format,
) -> Batch:
    """Stack samples to tensors (B, …) by entry. Entries in `TOKEN_ENTRIES` become int64; all others keep their dtype.

    Rows without one of `fields`, which the model requires, have zeros there. A `DataError` names an entry that does not
    meet the model's requirements, or that differs between rows (also in shape or dtype), and the rows as returned by
    `describe`.
    """
    import numpy as np

    fields = fields or {}
    absent = {name: np.zeros(entry.shape, entry.dtype) for name, entry in fields.items()}
    samples = [{**absent, **sample} for sample in samples]
    first = _forms(samples[0]) | _forms(fields)
    for number, sample in enumerate(samples):
        if (forms := _forms(sample)) != first:
            name = min(name for name, _ in first.items() ^ forms.items())
            one, other = first.get(name, "absent"), forms.get(name, "absent")
            if name in fields:
                raise DataError(f"entry {name!r} is {other} in {describe(number)}; the model takes {one}")
            raise DataError(
                f"entry {name!r} is {one} in {describe(0)} and {other} in {describe(number)}; "
                "all rows of a batch must have the same entries, of equal shape and dtype"
            )
    return {name: _stack([sample[name] for sample in samples], DTYPES.get(name)) for name in first}


def _forms(entries: Mapping[str, np.ndarray | BatchField]) -> dict[str, str]:
    return {name: f"{DTYPES.get(name, entry.dtype)} {tuple(entry.shape)}" for name, entry in entries.items()}


def _stack(arrays: Sequence[np.ndarray | int], dtype: str | None) -> Tensor:
    import numpy as np
    import torch

    return torch.from_numpy(np.stack(arrays, dtype=dtype))


@frozen(kw_only=True)
class Plain(LoaderComponent):
    """Reads ahead in one background thread, which suits memory-mapped data."""

    def problems(self, job: Job, layout: Layout) -> Iterator[Problem]:
        if job.data.workers:
            yield Problem(
                "type",
                f"reads in one thread, but data.workers = {job.data.workers}; "
                "set data.workers = 0, or leave [data.loader] out",
            )

    def build(
        self, context: BuildContext, reader: SampleReader, units: Iterator[Sequence[SampleRow]], units_per_step: int
    ) -> Generator[LoadedRows]:
        def load() -> LoadedRows | None:
            if (rows := next(units, None)) is None:
                return None
            loaded = reader.read(rows)
            if context.device.type != "cpu":  # here, so that the copy to pinned memory overlaps the step
                loaded = loaded._replace(batch={name: t.pin_memory() for name, t in loaded.batch.items()})
            return loaded

        # One thread: `units` and the lanes of streams are iterators, which must be read in order.
        executor = ThreadPoolExecutor(1, "forge-data")
        ahead = deque(executor.submit(load) for _ in range(UNITS_AHEAD))
        try:
            while (loaded := ahead.popleft().result()) is not None:
                ahead.append(executor.submit(load))
                yield loaded
        finally:
            # Waits for the unit that is being read: a thread inside torch at the interpreter's end aborts the process.
            executor.shutdown(cancel_futures=True)
