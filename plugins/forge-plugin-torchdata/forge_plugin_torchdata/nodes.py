"""The graph that reads ahead: sampler -> reading by workers, in order -> prefetcher -> pinned memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torchdata.nodes import BaseNode, Mapper, ParallelMapper, Prefetcher, SamplerWrapper

from forge_core.contracts.data import LoadedRows, SampleRow
from forge_plugin_torchdata.workers import PATIENCE_S, QUEUED, Workers

NO_SNAPSHOTS = {"snapshot_frequency": 0}
"""The core records the position of a run: the graph need not keep states."""


def load(
    workers: Workers, units: Iterator[Sequence[SampleRow]], ahead: int, device: torch.device
) -> Generator[LoadedRows]:
    """Yields the loaded units, in their order.

    Args:
        workers: the workers that read; closed at the end.
        units: the rows that are read at once.
        ahead: units that are kept ready.
        device: where they are sent; they are copied to pinned memory unless it is a CPU.

    Raises:
        DataError: a unit could not be read, or its worker died.
    """
    others = set(threading.enumerate())
    threads_of_torch = torch.get_num_threads()
    root = graph(workers, units, ahead, device)
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


def graph(workers: Workers, units: Iterator[Sequence[SampleRow]], ahead: int, device: torch.device) -> BaseNode[Any]:
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
    if device.type == "cpu":
        return node
    # Not torchdata's `PinMemory`, which asks `torch.cuda` on most devices. A thread of its own, as there
    return Prefetcher(Mapper(node, partial(_pinned, device)), 1, **NO_SNAPSHOTS)


def _pinned(device: torch.device, loaded: LoadedRows | Exception) -> LoadedRows | Exception:
    """Rows in pinned memory, by a thread that takes no memory of another device; errors as they are."""
    if isinstance(loaded, Exception):
        return loaded
    if set_device := getattr(torch.get_device_module(device), "set_device", None):
        set_device(device)
    return loaded._replace(batch={name: tensor.pin_memory() for name, tensor in loaded.batch.items()})
