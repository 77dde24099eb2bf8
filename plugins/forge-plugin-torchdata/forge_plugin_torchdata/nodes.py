"""The graph that reads ahead: sampler -> reading by workers, in order -> prefetcher -> pinned memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import torch
from torchdata.nodes import BaseNode, Mapper, ParallelMapper, PinMemory, Prefetcher, SamplerWrapper

from forge_core.contracts.data import LoadedRows, SampleRow
from forge_plugin_torchdata.workers import PATIENCE_S, QUEUED, Workers

NO_SNAPSHOTS = {"snapshot_frequency": 0}
"""The core records the position of a run: the graph need not keep states."""


def load(workers: Workers, units: Iterator[Sequence[SampleRow]], ahead: int, pin: bool) -> Generator[LoadedRows]:
    """Yields the loaded units, in their order.

    Args:
        workers: the workers that read; closed at the end.
        units: the rows that are read at once.
        ahead: units that are kept ready.
        pin: whether they are copied to pinned memory.

    Raises:
        DataError: a unit could not be read, or its worker died.
    """
    others = set(threading.enumerate())
    threads_of_torch = torch.get_num_threads()
    root = graph(workers, units, ahead, pin)
    try:
        root.reset()
        first = True
        for item in root:
            if first:
                # Threads of torchdata call torch.set_num_threads(1), which holds for all threads that start later.
                torch.set_num_threads(threads_of_torch)
                first = False
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        workers.close()  # first: threads of the graph may be waiting for a unit
        del root  # torchdata ends a graph when nobody refers to it, and has no other way
        deadline = time.monotonic() + PATIENCE_S
        for thread in set(threading.enumerate()) - others:
            # One that were inside torch when the interpreter ends would abort the process.
            # A signal may have come while one was being started
            if thread.daemon and thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))


def graph(workers: Workers, units: Iterator[Sequence[SampleRow]], ahead: int, pin: bool) -> BaseNode[Any]:
    """Returns the graph over the units; for the arguments see `load`."""
    node: BaseNode[Any] = SamplerWrapper(units)  # which needs an iterable only
    # Rows by number may be read by any worker: a `ParallelMapper` hands the next unit to an idle one. Its threads
    # wait for the workers of this plugin: torchdata's own processes would hang the run when one dies, and outlive a run
    # that is killed.
    # The rows of a lane must be read by one worker and in order. So one thread hands the units of streams out in turn,
    # since several that take from one queue may swap two of a lane, and the prefetcher keeps `ahead` units in flight.
    if workers.has_lanes:
        node = Mapper(Prefetcher(Mapper(node, workers.hand_out), ahead, **NO_SNAPSHOTS), workers.collect)
    else:
        node = ParallelMapper(node, workers.read, num_workers=QUEUED * workers.count, method="thread", **NO_SNAPSHOTS)
        node = Prefetcher(node, ahead, **NO_SNAPSHOTS)
    return PinMemory(node, **NO_SNAPSHOTS) if pin else node
