"""Workers that read units: processes or threads, each behind a separate executor.

A pool of several processes fails as a whole when one dies, and does not know which task that process had. With one
process per executor, the death of a worker is the failure of exactly the unit that it was reading.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.process import BaseProcess
from typing import ClassVar, Literal

import torch

from forge_core.contracts.data import LoadedRows, SampleReader, SampleRow
from forge_core.contracts.errors import DataError
from forge_kit.tools.forks import collect_own_garbage, collector_paused

QUEUED = 2
"""Units that a worker has at a time, so that it need not wait for the next one. When it dies, it was reading the first,
whose failure is the first to be raised."""
PARENT_CHECK_S = 1.0
"""Seconds between the checks of a worker process that the run is alive."""
PATIENCE_S = 5.0
"""Seconds that the end of a run waits for a unit that is being read, before the process that reads it is killed."""


class Workers:
    """Reads units by workers.

    A failure is returned, not raised: the graph would put its text into a different exception.
    """

    def __init__(self, reader: SampleReader, count: int, method: Literal["process", "thread"]) -> None:
        self.count = count
        self.has_lanes = reader.has_lanes
        self._reader = reader
        self._pids: list[Future[int]] = []
        self._processes: list[BaseProcess] = []
        self._executors: list[Executor]
        if method == "thread":
            self._executors = [ThreadPoolExecutor(1, "forge-data") for _ in range(count)]
        else:
            # torch.multiprocessing registers how tensors travel: through shared memory, not through the pipe.
            start = (reader, os.getpid())
            self._executors = [ProcessPoolExecutor(1, initializer=_begin, initargs=start) for _ in range(count)]
            before = multiprocessing.active_children()
            # The first task forks: here, so that the processes start from the thread that will live longest, and read
            # while the rest of the graph is made.
            with collector_paused():
                self._pids = [executor.submit(os.getpid) for executor in self._executors]
            self._processes = [child for child in multiprocessing.active_children() if child not in before]
        self._idle: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in [*range(count)] * QUEUED:
            self._idle.put(number)
        self._handed_out = 0

    def read(self, rows: Sequence[SampleRow]) -> LoadedRows | Exception:
        """Read a unit by the worker with the shortest queue. Called from `QUEUED` threads for each worker."""
        number = self._idle.get()
        try:
            return self._result(number, rows, self._submit(number, rows))
        except Exception as error:  # the executor was shut down
            return error
        finally:
            self._idle.put(number)

    def hand_out(self, rows: Sequence[SampleRow]) -> tuple[int, Sequence[SampleRow], Future[LoadedRows | Exception]]:
        """Submit a unit to the workers in turn, so that a lane is always read by the same worker, in order."""
        number = self._handed_out % self.count
        self._handed_out += 1
        return number, rows, self._submit(number, rows)

    def collect(
        self, handed_out: tuple[int, Sequence[SampleRow], Future[LoadedRows | Exception]]
    ) -> LoadedRows | Exception:
        """Returns the unit that `hand_out` submitted."""
        number, rows, future = handed_out
        return self._result(number, rows, future)

    def close(self) -> None:
        """End all workers."""
        # Without waiting first: a read that hangs must not hold up the end, and only processes can be killed.
        for executor in self._executors:
            executor.shutdown(wait=False, cancel_futures=True)
        deadline = time.monotonic() + PATIENCE_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                process.kill()
        for executor in self._executors:
            executor.shutdown()

    def _submit(self, number: int, rows: Sequence[SampleRow]) -> Future[LoadedRows | Exception]:
        if isinstance(self._executors[number], ThreadPoolExecutor):
            return self._executors[number].submit(_attempt, self._reader, rows)
        try:
            return self._executors[number].submit(_read, rows)
        except BrokenProcessPool:  # it died between two units
            described = "; ".join(map(self._reader.describe, rows))
            future: Future[LoadedRows | Exception] = Future()
            future.set_result(DataError(f"a data worker died ({self._death(number)}); it was to read {described}"))
            return future

    def _result(
        self, number: int, rows: Sequence[SampleRow], future: Future[LoadedRows | Exception]
    ) -> LoadedRows | Exception:
        try:
            return future.result()
        except BrokenProcessPool:
            rows_read = "; ".join(map(self._reader.describe, rows))
            return DataError(f"a data worker died ({self._death(number)}); it was reading {rows_read}")

    def _death(self, number: int) -> str:
        error = self._pids[number].exception()
        if error is not None:
            return f"it could not start: {error}"
        [process] = [process for process in self._processes if process.pid == self._pids[number].result()]
        process.join(PATIENCE_S)
        # The executor's own thread joins it too, and whichever of the two is first has the exit code: it notes it for
        # both a moment later.
        deadline = time.monotonic() + PATIENCE_S
        while (code := process.exitcode) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        cause = f"exit code {code}" if code is None or code >= 0 else f"killed by {signal.Signals(-code).name}"
        return f"process {process.pid}, {cause}"


class _Worker:
    """State of a worker process."""

    reader: ClassVar[SampleReader]


def _begin(reader: SampleReader, parent: int) -> None:
    """Initialise a worker process."""
    collect_own_garbage()
    _Worker.reader = reader
    torch.set_num_threads(1)
    # Ctrl-C and a scheduler's signal reach the whole process group. The run then saves before it ends, and for that it
    # needs its data: workers end with the run, and not before.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """End this process when the run has been killed, and so cannot end it."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os._exit(1)


def _read(rows: Sequence[SampleRow]) -> LoadedRows | Exception:
    return _attempt(_Worker.reader, rows)


def _attempt(reader: SampleReader, rows: Sequence[SampleRow]) -> LoadedRows | Exception:
    try:
        return reader.read(rows)
    except Exception as error:
        return error
