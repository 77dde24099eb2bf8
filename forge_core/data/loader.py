"""From the order of samples to micro-batches on the device, loaded in the background."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, cast

import torch

from forge_core.config.mixture import WORKER_LOADER, source_names
from forge_core.contracts.data import Batch, Dataset, LoadedRows, SampleRow, Stream, identity_of
from forge_core.contracts.errors import DataError
from forge_core.data.mixture import check_supply, sample_order, sizes_of
from forge_core.data.order import SampleOrder
from forge_core.data.reading import LanePositions, Plain, RowReader
from forge_core.parallel.layout import micro_batches
from forge_core.parallel.mesh import gather_objects, sample_rank

if TYPE_CHECKING:
    from forge_core.checkpoint.state import Progress
    from forge_core.contracts.components import LoaderComponent
    from forge_core.job import Job
    from forge_core.plugins.catalog import Catalog
    from forge_core.plugins.manager import RunContext


class TrainLoader:
    """This rank's micro-batches of each step, from a given position on.

    `[data.loader]` reads ahead. The order is always that of `SampleOrder`, and the position counts what was returned,
    not what was read ahead.
    """

    def __init__(
        self, job: Job, datasets: Sequence[Dataset | Stream], context: RunContext, progress: Progress | None = None
    ) -> None:
        """Start to read.

        Args:
            job: the job.
            datasets: its sources, in their order.
            context: device, mesh and layout.
            progress: where to continue, with the `state()` of a loader in its `samples`.

        Raises:
            JobError: the sources do not last as long as the run.
        """
        self._job, self._datasets, self._context = job, datasets, context
        self._names = source_names(job)
        self._streams = [data for data in datasets if isinstance(data, Stream)]
        self._rows = job.train.global_batch_size
        count, self._micro_batch_size = micro_batches(job, context.layout)
        self._share = count * self._micro_batch_size
        self._first_row = sample_rank(context.mesh, context.layout) * self._share
        # Rows that must be read together: those of a lane; 1 without streams.
        rows_per_lane = math.lcm(*(self._rows // stream.lanes for stream in self._streams))
        self._parts = _parts(self._share, job.data.workers, rows_per_lane)
        sizes = sizes_of(datasets)
        check_supply(job, sizes, progress)
        order = sample_order(job, sizes, progress)
        self._position = order.state()
        # One entry for each step that was drawn and not yet returned. The order runs ahead with the loader, so the
        # position for a checkpoint is recorded at drawing: to count the samples again would cost a save 1 µs each.
        self._positions_ahead: deque[dict[str, Any]] = deque()
        self._first_lanes: LanePositions = progress.samples.get("lanes", {}) if progress else {}
        self._lanes: dict[tuple[int, int], Mapping[str, Any]] = {}
        self.waited = 0.0
        """Seconds that the last `next_step` waited for data."""
        reader = RowReader(datasets, self._names, self._rows, self._first_lanes)
        inputs = {"reader": reader, "units": self._units(order), "units_per_step": len(self._parts)}
        loader = loader_component(job, context.plugins.catalog)
        self._loaded: Generator[LoadedRows] = context.build(loader, **inputs)

    def next_step(self) -> list[Batch]:
        """The micro-batches of the next step, on the device.

        Raises:
            DataError: a sample could not be read; names its source, number and file.
        """
        started = time.perf_counter()
        loaded = list(islice(self._loaded, len(self._parts)))
        self.waited = time.perf_counter() - started
        if len(loaded) < len(self._parts):
            raise DataError("the sources are used up before the run has ended")
        self._position = self._positions_ahead.popleft()
        for rows in loaded:
            self._lanes |= rows.positions
        device = self._context.device
        parts = [{name: t.to(device, non_blocking=True) for name, t in rows.batch.items()} for rows in loaded]
        # Joined on the device, where it does not hold up the host. `cat` would copy even a single part.
        step = parts[0] if len(parts) == 1 else {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        starts = range(0, self._share, self._micro_batch_size)
        return [{name: t[start : start + self._micro_batch_size] for name, t in step.items()} for start in starts]

    def state(self) -> dict[str, Any]:
        """Returns the position after the last step returned, over all ranks, as plain JSON.

        Collective if there are streams, since each rank knows the positions of its own lanes only.
        """
        identities = identities_of(self._job, self._datasets)
        sources = {
            name: source | ({"identity": identities[name]} if name in identities else {})
            for name, source in self._position["sources"].items()
        }
        position = self._position | {"sources": sources}
        if not self._streams:
            return position
        # Lanes that have yielded nothing since the resume continue where they were then.
        lanes = {source: dict(positions) for source, positions in self._first_lanes.items()}
        for of_rank in gather_objects(self._lanes):
            for (source, lane), lane_position in of_rank.items():
                lanes.setdefault(self._names[source], {})[str(lane)] = lane_position
        return position | {"lanes": lanes}

    def close(self) -> None:
        """Stop reading."""
        self._loaded.close()

    def _units(self, order: SampleOrder) -> Iterator[list[SampleRow]]:
        """Rows of each part of each step, until the sources are used up, which is not before the last step."""
        first, share, after = self._first_row, self._share, self._rows - self._first_row - self._share
        while True:
            # Every rank draws the whole global batch and reads its share, so all positions agree without communication.
            order.advance(first)
            rows = [SampleRow(slot, *sample) for slot, sample in enumerate(islice(order, share), first)]
            if len(rows) < share or order.advance(after) < after:
                return
            self._positions_ahead.append(order.state())
            yield from (rows[part] for part in self._parts)


def loader_component(job: Job, catalog: Catalog) -> LoaderComponent:
    """The loader of `[data.loader]`; without that table `Plain`, or with `data.workers` `WORKER_LOADER`."""
    if job.data.loader is not None:
        return job.data.loader
    if not job.data.workers:
        return Plain()
    return cast("LoaderComponent", catalog.load("loader", WORKER_LOADER)())


def identities_of(job: Job, datasets: Sequence[Dataset | Stream]) -> dict[str, str]:
    """Name of each source that knows its identity -> that identity (see `HasIdentity`)."""
    pairs = zip(source_names(job), datasets, strict=True)
    return {name: identity for name, data in pairs if (identity := identity_of(data))}


def _parts(share: int, workers: int, rows_per_lane: int) -> list[slice]:
    """A rank's rows of a step divided among its workers, alike at every step; no lane is split between two."""
    lanes = share // rows_per_lane
    count = min(max(workers, 1), lanes)
    bounds = [rows_per_lane * (lanes * part // count) for part in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(bounds)]
