"""Batches on the device: micro-batches of training steps, read ahead, and held-out batches for evaluation.

B: sequences of a micro-batch.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset

from forge_core.checkpoint.state import Progress
from forge_core.config.mixture import source_names
from forge_core.contracts.contexts import BuildContext
from forge_core.contracts.data import (
    BYTES_PER_TOKEN,
    IGNORED_LABEL,
    Batch,
    Dataset,
    HasCost,
    LoadedRows,
    Sample,
    SampleRow,
    Stream,
    identity_of,
)
from forge_core.contracts.errors import DataError
from forge_core.data.order import SampleOrder, check_supply, sample_order, sizes_of
from forge_core.data.reading import LanePositions, Plain, RowReader, collate
from forge_core.job import WORKER_LOADER, Job
from forge_core.launch.progress_beacon import report_progress
from forge_core.parallel.layout import micro_batches
from forge_core.parallel.mesh import gather_objects, sample_rank
from forge_core.plugins.manager import RunContext


class TrainLoader:
    """This rank's micro-batches of each step, from a given position on, read ahead by `[data.loader]`.

    `SampleOrder` always defines the order. The position belongs to the last step returned, regardless of reading ahead.
    """

    def __init__(
        self, job: Job, datasets: Sequence[Dataset | Stream], context: RunContext, progress: Progress | None = None
    ) -> None:
        """Continues from `progress`; raises JobError if the sources do not last as long as the run."""
        self._job, self._datasets, self._context = job, datasets, context
        self._names = source_names(job)
        layout = context.layout
        self._place = layout.run[0] * layout.data_parallel + sample_rank(context.mesh, layout)
        self._ranks = layout.data_parallel * layout.run[1]
        # The rows of a lane are read by one worker, in order; without streams `lcm` is 1, and any row goes anywhere.
        rows = job.train.global_batch_size
        self._rows_per_lane = math.lcm(*(rows // data.lanes for data in datasets if isinstance(data, Stream)))
        # Equally many in every step: those of the smallest batch.
        smallest = min(job.train.batch_sizes.values()) // self._ranks
        self._parts = min(max(job.data.workers, 1), smallest // self._rows_per_lane)
        sizes = sizes_of(datasets)
        check_supply(job, sizes, progress)
        order = sample_order(job, sizes, progress)
        self._position = order.state()
        # One entry for each step that was drawn and not yet returned. The order runs ahead with the loader, so the
        # position for a checkpoint is recorded at drawing: counting the samples again would cost a save 1 µs each.
        self._positions_ahead: deque[dict[str, Any]] = deque()
        self._first_lanes: LanePositions = progress.samples.get("lanes", {}) if progress else {}
        self._lanes: dict[tuple[int, int], Mapping[str, Any]] = {}
        self.waited, self.rows = 0.0, 0
        """Seconds that the last `next_step` waited for data, and rows of its global batch."""
        self._reader = RowReader(job, datasets, self._names, self._first_lanes)
        loader: Any = job.data.loader or Plain()
        if job.data.workers and not job.data.loader:
            loader = context.plugins.catalog.load("loader", WORKER_LOADER)()
        self._loaded: Generator[LoadedRows] = context.build(
            loader, reader=self._reader, units=self._units(order), units_per_step=self._parts
        )

    def next_step(self) -> list[Batch]:
        """Returns the micro-batches of the next step, on the device: tensors (B, …) by entry.

        A `DataError` names source, number and file of a sample that could not be read.
        """
        started = time.perf_counter()
        loaded = list(islice(self._loaded, self._parts))
        self.waited = time.perf_counter() - started
        if len(loaded) < self._parts:
            raise DataError("the data ended before the run: the sources are used up, or [data.loader] left rows out")
        before, self._position = self._position["drawn"], self._positions_ahead.popleft()
        self.rows = self._position["drawn"] - before
        for rows in loaded:
            self._lanes |= rows.positions
        device = self._context.device
        parts = [{name: t.to(device, non_blocking=True) for name, t in rows.batch.items()} for rows in loaded]
        # Concatenated on the device, where it does not hold up the host. `cat` would copy even a single part.
        step = parts[0] if len(parts) == 1 else {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        share = self.rows // self._ranks
        size = self._job.train.micro_batch_size or share
        return [{name: t[at : at + size] for name, t in step.items()} for at in range(0, share, size)]

    def state(self) -> dict[str, Any]:
        """Returns the position after the last step returned, over all ranks, as plain JSON.

        Collective if there are streams, since each rank has only the positions of the lanes that it reads.
        """
        identities = {name: {"identity": known} for name, known in identities_of(self._job, self._datasets).items()}
        sources = {name: source | identities.get(name, {}) for name, source in self._position["sources"].items()}
        position = self._position | {"sources": sources}
        if not self._reader.has_lanes:
            return position
        # By lane and not by rank, so that another number of ranks continues. Lanes that have yielded nothing since the
        # resume keep the position that they had then.
        lanes = {source: dict(positions) for source, positions in self._first_lanes.items()}
        for of_rank in gather_objects(self._lanes):
            for (source, lane), lane_position in of_rank.items():
                lanes.setdefault(self._names[source], {})[str(lane)] = lane_position
        return position | {"lanes": lanes}

    def close(self) -> None:
        """Stop reading."""
        self._loaded.close()

    def _units(self, order: SampleOrder) -> Iterator[list[SampleRow]]:
        """Yields the rows of each part of each step, until the sources are used up: not before the last step."""
        while True:
            batch = self._job.train.sample_after(1, order.drawn) - order.drawn
            share = batch // self._ranks
            first = self._place * share
            own, after = slice(first, first + share), batch - first - share
            if self._reader.has_costs:  # then each rank needs to know all rows, and not only how many precede its own
                first, after = 0, 0
            # Every rank draws the whole global batch and reads its share: positions agree without communication, and
            # row i is the same sample on any number of ranks.
            order.advance(first)
            read = batch - first - after
            rows = [SampleRow(slot, *sample) for slot, sample in enumerate(islice(order, read), first)]
            if len(rows) < read or order.advance(after) < after:
                return
            if self._reader.has_costs:
                # Among ranks first, which wait for each other at the latest when the step's gradients are summed.
                micro_batch = self._job.train.micro_batch_size or share
                rows = share_out(share_out(rows, self._cost, share)[own], self._cost, micro_batch)
            # Before the step's rows are handed out: `next_step` takes the position as soon as it has read them.
            self._positions_ahead.append(order.state())
            lanes = share // self._rows_per_lane
            bounds = [self._rows_per_lane * (lanes * part // self._parts) for part in range(self._parts + 1)]
            yield from (rows[start:stop] for start, stop in pairwise(bounds))

    def _cost(self, row: SampleRow) -> float | None:
        """The cost of a row; None for one of a stream, which belongs to the lane of its place."""
        data = self._datasets[row.source]
        if isinstance(data, Stream):
            return None
        return data.cost(row.number) if isinstance(data, HasCost) else 0.0


def identities_of(job: Job, datasets: Sequence[Dataset | Stream]) -> dict[str, str]:
    """Returns the identity (see `HasIdentity`) of each source that has one, by the source's name."""
    pairs = zip(source_names(job), datasets, strict=True)
    return {name: identity for name, data in pairs if (identity := identity_of(data))}


def share_out(rows: Sequence[SampleRow], cost_of: Callable[[SampleRow], float | None], size: int) -> list[SampleRow]:
    """The rows in an order in which each `size` of them, a rank's or a micro-batch's, cost about the same.

    The dearest row goes first, each to the part that costs least so far and has room (longest processing time first,
    Graham 1969). Rows whose cost is None keep their places.
    """
    free = {place: cost for place, cost in enumerate(map(cost_of, rows)) if cost is not None}
    room = [[place for place in range(start, start + size) if place in free] for start in range(0, len(rows), size)]
    loads = [(0.0, number) for number, places in enumerate(room) if places]  # a heap
    shared = list(rows)
    for place in sorted(free, key=free.__getitem__, reverse=True):
        load, number = heappop(loads)
        shared[room[number].pop(0)] = rows[place]
        if room[number]:
            heappush(loads, (load + free[place], number))
    return shared


class Concatenated(ConcatDataset):
    """The held-out sequences of several sources, one after the other.

    If the mean bytes per token of every source are known, each sequence has them as entry `BYTES_PER_TOKEN`, so that an
    evaluation weights each source by the number of its evaluated tokens.
    """

    def __init__(self, datasets: Sequence[Dataset]) -> None:
        super().__init__(datasets)  # type: ignore[arg-type]  # torch's datasets are a class, ours a protocol
        lengths = [len(dataset) for dataset in datasets]
        self.held_out: Dataset | None = None
        rates = [dataset.bytes_per_token for dataset in datasets]
        self._all_known = None not in rates
        self.bytes_per_token = float(np.average(rates, weights=lengths)) if self._all_known else None  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Sample:
        sample = super().__getitem__(index)
        dataset: Any = self.datasets[bisect_right(self.cumulative_sizes, index)]
        return {**sample, BYTES_PER_TOKEN: np.array(dataset.bytes_per_token)} if self._all_known else sample


def held_out(datasets: Sequence[Dataset | Stream]) -> Dataset | None:
    """Returns the held-out sequences of all sources together; None if there are none."""
    parts = [dataset.held_out for dataset in datasets if dataset.held_out is not None and len(dataset.held_out)]
    return Concatenated(parts) if parts else None


def evaluation_batches(dataset: Dataset, count: int, job: Job, context: BuildContext) -> Iterator[Batch]:
    """Yields this rank's batches of `count` sequences of `dataset`, 0 for all; see `EvaluationContext.batches`."""
    count = min(count or len(dataset), len(dataset))
    # Spread evenly: sources follow one another, so the first `count` sequences would be of the first source alone.
    drawn = [number * len(dataset) // count for number in range(count)]
    ranks, size = context.layout.data_parallel, micro_batches(job, context.layout)[1]
    rank = sample_rank(context.mesh, context.layout)
    # Every rank yields equally many batches of equal shape, or collectives would hang: ignored rows pad the last ones.
    sample = dataset[0]
    ignored = {**sample, "labels": np.full(sample["labels"].shape, IGNORED_LABEL, np.int64)}
    for start in range(0, count, ranks * size):
        first = start + rank * size
        rows = [dataset[index] for index in drawn[first : first + size]]
        report_progress(done=start, total=count)
        batch = collate([*rows, *[ignored] * (size - len(rows))], job.model.batch_fields(job))
        yield {name: tensor.to(context.device, non_blocking=True) for name, tensor in batch.items()}
