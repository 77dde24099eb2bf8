"""Reading rows of the global batch, and the loader that reads them ahead in one thread.

B: rows that are read together. torch is imported late, so that a job that names the loader is checked without it.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from attrs import frozen

from forge_core.contracts.components import LoaderComponent
from forge_core.contracts.data import TOKEN_ENTRIES, HasLocation, LoadedRows, SampleRow, Stream
from forge_core.contracts.errors import DataError, Problem

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Batch, Dataset, SampleReader
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job

UNITS_AHEAD = 2
"""Units of rows that the thread reads ahead."""

LanePositions = Mapping[str, Mapping[str, Any]]
"""Source name -> lane -> position, plain JSON."""


class RowReader:
    """Reads rows (see `SampleReader`); lanes stay open from one row to the next."""

    def __init__(
        self, datasets: Sequence[Dataset | Stream], names: Sequence[str], rows: int, positions: LanePositions
    ) -> None:
        """`rows`: of a global batch. `positions`: where lanes continue; absent ones start from the beginning."""
        self._datasets, self._names, self._rows, self._start = datasets, names, rows, positions
        self._streams = {number: data for number, data in enumerate(datasets) if isinstance(data, Stream)}
        self._lanes: dict[tuple[int, int], Iterator[tuple[Mapping[str, np.ndarray], Mapping[str, Any]]]] = {}

    @property
    def has_lanes(self) -> bool:
        return bool(self._streams)

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
                raise self._failure(row, error) from error
            samples.append(sample)
        batch = collate(samples, lambda number: self.describe(rows[number]))
        batch["sources"] = _stack([row.source for row in rows], "int64")
        return LoadedRows(batch, positions)

    def describe(self, row: SampleRow) -> str:
        name, dataset = self._names[row.source], self._datasets[row.source]
        if row.source in self._streams:
            return f"lane {self._lane(row)} of source {name!r}"
        location = f" ({dataset.where(row.number)})" if isinstance(dataset, HasLocation) else ""
        return f"sequence {row.number} of source {name!r}{location}"

    def _lane(self, row: SampleRow) -> int:
        return row.slot * self._streams[row.source].lanes // self._rows

    def _open(self, source: int, lane: int) -> Iterator[tuple[Mapping[str, np.ndarray], Mapping[str, Any]]]:
        if (source, lane) not in self._lanes:
            position = self._start.get(self._names[source], {}).get(str(lane))
            self._lanes[source, lane] = self._streams[source].read(lane, position)
        return self._lanes[source, lane]

    def _failure(self, row: SampleRow, error: Exception) -> DataError:
        # A generator that has failed is exhausted, and its next sample would be another one: the lane is closed.
        failure = DataError(f"cannot read {self.describe(row)}: {type(error).__name__}: {error}")
        failure.add_note("".join(traceback.format_exception(error)))  # tracebacks do not survive the way to a parent
        return failure


def collate(
    samples: Sequence[Mapping[str, np.ndarray]], describe: Callable[[int], str] = "row {} of the batch".format
) -> Batch:
    """Stack samples. Entries in `TOKEN_ENTRIES` become int64; all others keep their dtype.

    Args:
        samples: the entries of each row.
        describe: returns the description of a row, by its number, for errors.

    Returns:
        Tensors (B, …) by entry.

    Raises:
        DataError: rows differ in their entries, or in shape or dtype of one; names both rows and the entry.
    """
    first = {name: _form(samples[0], name) for name in samples[0]}
    for number, sample in enumerate(samples):
        forms = {name: _form(sample, name) for name in sample}
        for name in sorted({*first, *forms}) if forms != first else ():
            one, other = first.get(name, "absent"), forms.get(name, "absent")
            if one != other:
                message = f"entry {name!r} is {one} in {describe(0)} and {other} in {describe(number)}"
                raise DataError(f"{message}; all rows of a batch must have the same entries, of equal shape and dtype")
    return {name: _stack([sample[name] for sample in samples], _dtype(name)) for name in first}


def _form(sample: Mapping[str, np.ndarray], name: str) -> str:
    return f"{_dtype(name) or sample[name].dtype} {tuple(sample[name].shape)}"


def _dtype(name: str) -> str | None:
    return "int64" if name in TOKEN_ENTRIES else None


def _stack(arrays: Sequence[np.ndarray | int], dtype: str | None) -> Tensor:
    import numpy as np
    import torch

    return torch.from_numpy(np.stack(arrays, dtype=dtype))


@frozen(kw_only=True)
class Plain(LoaderComponent):
    """Reads ahead in one background thread, which suits memory-mapped data."""

    def problems(self, job: Job, layout: Layout) -> Iterator[Problem]:
        if job.data.workers:
            message = f"reads in one thread, but data.workers = {job.data.workers}"
            yield Problem("type", f"{message}; set data.workers = 0, or leave [data.loader] out")

    def build(
        self, context: BuildContext, reader: SampleReader, units: Iterator[Sequence[SampleRow]], units_per_step: int
    ) -> Generator[LoadedRows]:
        ready: queue.Queue[LoadedRows | Exception | None] = queue.Queue(maxsize=UNITS_AHEAD)
        stop = threading.Event()

        def work() -> None:
            try:
                for rows in units:
                    if stop.is_set():
                        return
                    loaded = reader.read(rows)
                    if context.device.type == "cuda":  # here, so that the copy to pinned memory overlaps the step
                        loaded = loaded._replace(batch={name: t.pin_memory() for name, t in loaded.batch.items()})
                    ready.put(loaded)
                ready.put(None)
            except Exception as error:
                ready.put(error)

        thread = threading.Thread(target=work, name="forge-data", daemon=True)
        thread.start()
        try:
            while (item := ready.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            stop.set()
            with suppress(queue.Empty):
                while True:  # the thread may be waiting for room
                    ready.get_nowait()
            thread.join()  # if it were inside torch when the interpreter ends, the process would abort
