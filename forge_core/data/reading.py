"""Reading samples, in a background thread or in worker processes.

A unit is what is read at once: this process's rows of one step, or a worker's part of them.
"""

from __future__ import annotations

import os
import queue
import re
import signal
import threading
import traceback
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from ctypes import c_long
from multiprocessing.sharedctypes import RawArray
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from forge_core.contracts.data import Batch, Dataset, Stream
from forge_core.contracts.errors import DataError

UNITS_AHEAD = 2
"""Units that the thread, or each worker, reads ahead."""

LanePositions = Mapping[str, Mapping[str, Any]]
"""Source name -> lane -> position, plain JSON."""


class Row(NamedTuple):
    """A row of the global batch, and the sample that fills it."""

    slot: int
    """Number of the row in the global batch."""
    source: int
    number: int
    """Of the sequence in its source; in a stream, the next of the row's lane is taken."""


class Unit(NamedTuple):
    """Rows that were read together."""

    batch: Batch
    positions: Mapping[tuple[int, int], Mapping[str, Any]]
    """(source, lane) -> where the lane continues after these rows."""


class Reader:
    """Reads rows. It keeps the lanes that it has opened, so all rows of a lane must come to the same reader."""

    def __init__(
        self, datasets: Sequence[Dataset | Stream], names: Sequence[str], rows: int, positions: LanePositions
    ) -> None:
        """Args: `rows`, of a global batch; `positions`, where lanes start (from nothing if absent)."""
        self._datasets, self._names, self._rows, self._start = datasets, names, rows, positions
        self._streams = {number: data for number, data in enumerate(datasets) if isinstance(data, Stream)}
        self._lanes: dict[tuple[int, int], Iterator[tuple[Mapping[str, np.ndarray], Mapping[str, Any]]]] = {}

    def read(self, rows: Sequence[Row]) -> Unit:
        """The samples of these rows, stacked, with `sources` (B,): the number of the source of each.

        Raises:
            DataError: names what could not be read; the cause's traceback is in a note.
        """
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
        batch = collate(samples)
        batch["sources"] = torch.tensor([row.source for row in rows])
        return Unit(batch, positions)

    def describe(self, row: Row) -> str:
        """Which sample a row is, and the file that it comes from where the source knows."""
        name, dataset = self._names[row.source], self._datasets[row.source]
        if row.source in self._streams:
            return f"lane {self._lane(row)} of source {name!r}"
        where = getattr(dataset, "where", None)
        return f"sequence {row.number} of source {name!r}" + (f" ({where(row.number)})" if where else "")

    def _lane(self, row: Row) -> int:
        return row.slot * self._streams[row.source].lanes // self._rows

    def _open(self, source: int, lane: int) -> Iterator[tuple[Mapping[str, np.ndarray], Mapping[str, Any]]]:
        if (source, lane) not in self._lanes:
            position = self._start.get(self._names[source], {}).get(str(lane))
            self._lanes[source, lane] = self._streams[source].read(lane, position)
        return self._lanes[source, lane]

    def _failure(self, row: Row, error: Exception) -> DataError:
        failure = DataError(f"cannot read {self.describe(row)}: {type(error).__name__}: {error}")
        failure.add_note("".join(traceback.format_exception(error)))
        return failure


def collate(samples: Sequence[Mapping[str, np.ndarray]]) -> Batch:
    """Stack samples; integers become int64."""
    return {name: _stack([sample[name] for sample in samples]) for name in samples[0]}


def _stack(arrays: Sequence[np.ndarray]) -> Tensor:
    shape, kind = arrays[0].shape, arrays[0].dtype.kind
    for array in arrays:
        if array.shape != shape:
            raise DataError(f"samples of one batch differ in shape: {shape} and {array.shape}")
    return torch.from_numpy(np.stack(arrays, dtype=np.int64 if kind in "iu" else None))


def thread_units(reader: Reader, plan: Iterator[list[Row]], pin: bool) -> Generator[Unit]:
    """The units of `plan`, read ahead in a thread.

    Raises:
        DataError: see `Reader.read`.
    """
    ready: queue.Queue[Unit | Exception] = queue.Queue(maxsize=UNITS_AHEAD)
    stop = threading.Event()

    def work() -> None:
        try:
            for rows in plan:
                if stop.is_set():
                    return
                unit = reader.read(rows)
                ready.put(_pinned(unit) if pin else unit)
            ready.put(DataError("the sources are used up before the run has ended"))
        except Exception as error:
            ready.put(error)

    thread = threading.Thread(target=work, name="forge-data", daemon=True)
    thread.start()
    try:
        while True:
            item = ready.get()
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        stop.set()
        with suppress(queue.Empty):
            while True:  # the thread may be waiting for room
                ready.get_nowait()
        thread.join()  # if it were inside torch when the interpreter ends, the process would abort


def _pinned(unit: Unit) -> Unit:
    return unit._replace(batch={name: tensor.pin_memory() for name, tensor in unit.batch.items()})


def worker_units(reader: Reader, plan: Iterator[list[Row]], workers: int, pin: bool) -> Generator[Unit]:
    """The units of `plan`, read ahead in processes: unit n by process n modulo `workers`.

    Raises:
        DataError: see `Reader.read`; or a process died, in which case it names what that process was reading.
    """
    tasks = _Tasks(plan)
    work = _Work(reader, workers)
    loader = DataLoader(work, sampler=tasks, batch_size=None, num_workers=workers, pin_memory=pin)
    units = _without_signal_handler(loader)
    while True:
        try:
            item = next(units)
        except RuntimeError as error:
            if not (died := work.of_processes(str(error))):
                raise
            rows = [row for number in died for row in tasks.waiting.get(number, ())]
            read = "; ".join(map(reader.describe, rows)) or "nothing yet"
            raise DataError(f"a data worker died ({error}); it was reading {read}") from error
        tasks.waiting.pop(next(iter(tasks.waiting)))
        if isinstance(item, Exception):
            raise item
        yield item


class _Tasks:
    """The plan as what the DataLoader hands out: numbered, and remembered until the unit has arrived."""

    def __init__(self, plan: Iterator[list[Row]]) -> None:
        self._plan = plan
        self.waiting: dict[int, list[Row]] = {}

    def __iter__(self) -> Iterator[tuple[int, list[Row]]]:
        for number, rows in enumerate(self._plan):
            self.waiting[number] = rows
            yield number, rows


class _Work(torch.utils.data.Dataset[Any]):
    """What worker processes run. Shared memory says which task each is at, in case it dies."""

    def __init__(self, reader: Reader, workers: int) -> None:
        self._reader = reader
        self._tasks, self._processes = RawArray(c_long, workers), RawArray(c_long, workers)

    def __getitem__(self, task: Any) -> Unit | Exception:
        number, rows = task
        info = get_worker_info()
        assert info is not None
        self._tasks[info.id], self._processes[info.id] = number, os.getpid()
        try:
            return self._reader.read(rows)
        except Exception as error:  # raised where it is awaited: the DataLoader would put its text into another
            return error

    def of_processes(self, message: str) -> list[int]:
        """The tasks of the processes whose numbers the DataLoader's message about a death gives."""
        numbers = re.search(r"DataLoader worker \(pid\(?s?\)? ([\d, ]+)\)", message)
        dead = [int(number) for number in numbers[1].split(",")] if numbers else []
        return [task for task, process in zip(self._tasks, self._processes, strict=True) if process in dead]


def _without_signal_handler(loader: DataLoader) -> Iterator[Any]:
    """The loader's iterator, without its handler of SIGCHLD, which would raise at any point of the training; the
    death of a worker is still noticed where its unit is awaited."""
    previous = signal.getsignal(signal.SIGCHLD)
    units = iter(loader)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, previous)
    return units
