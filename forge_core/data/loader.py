"""From the order of samples to micro-batches on the device, loaded in the background."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

import torch

from forge_core.config.mixture import source_names
from forge_core.contracts.data import Batch, Dataset, Stream
from forge_core.data.mixture import sample_order, sizes_of
from forge_core.data.order import SampleOrder
from forge_core.data.reading import LanePositions, Reader, Row, Unit, thread_units, worker_units
from forge_core.data.supply import check_supply
from forge_core.parallel.layout import micro_batches
from forge_core.parallel.mesh import gather_objects, sample_rank

if TYPE_CHECKING:
    from forge_core.checkpoint.state import Progress
    from forge_core.config.job import Job
    from forge_core.contracts.contexts import BuildContext


class TrainLoader:
    """This rank's micro-batches of each step, from a given position on.

    `workers = 0` loads in a background thread, which suits memory-mapped data; more load in as many processes. Either
    way the order is that of `SampleOrder`, and the position is what was handed out, not what was loaded ahead.
    """

    def __init__(
        self,
        job: Job,
        datasets: Sequence[Dataset | Stream],
        context: BuildContext,
        progress: Progress | None = None,
    ) -> None:
        """Args: `progress`, where to continue, with what `state()` gave in its `samples`.

        Raises:
            JobError: the sources do not last as long as the run.
        """
        self._job, self._datasets, self._device = job, datasets, context.device
        self._names = source_names(job)
        self._streams = [data for data in datasets if isinstance(data, Stream)]
        self._rows = job.train.global_batch_size
        count, self._micro_batch_size = micro_batches(job, context.layout)
        self._share = count * self._micro_batch_size
        self._first_row = sample_rank(context.mesh, context.layout) * self._share
        self._parts = _parts(self._share, job.data.workers, self._rows_of_a_lane())
        sizes = sizes_of(datasets)
        check_supply(job, sizes, progress)
        self._start = sample_order(job, sizes, progress)
        self._handed_out = 0
        self._first_positions: LanePositions = progress.samples.get("lanes", {}) if progress else {}
        self._moved: dict[tuple[int, int], Mapping[str, Any]] = {}
        self.waited = 0.0
        """Seconds that the last `next_step` waited for data."""
        self._units = self._load(sample_order(job, sizes, progress))

    def next_step(self) -> list[Batch]:
        """The micro-batches of the next step, on the device.

        Raises:
            DataError: a sample could not be read; names its source, number and file.
        """
        started = time.perf_counter()
        units = [next(self._units) for _ in self._parts]
        self.waited = time.perf_counter() - started
        self._handed_out += self._rows
        for unit in units:
            self._moved |= unit.positions
        step = _joined([self._to_device(unit) for unit in units])
        starts = range(0, self._share, self._micro_batch_size)
        return [{name: t[start : start + self._micro_batch_size] for name, t in step.items()} for start in starts]

    def state(self) -> dict[str, Any]:
        """What was handed out so far, over all ranks, as plain JSON: where to continue.

        Collective if there are streams, since each rank knows the positions of its own lanes only.
        """
        self._start.advance(self._handed_out)
        self._handed_out = 0
        if not self._streams:
            return self._start.state()
        lanes = {source: dict(positions) for source, positions in self._first_positions.items()}
        for moved in gather_objects(self._moved):
            for (source, lane), position in moved.items():
                lanes.setdefault(self._names[source], {})[str(lane)] = position
        return self._start.state() | {"lanes": lanes}

    def close(self) -> None:
        """Stop loading."""
        self._units.close()

    def _rows_of_a_lane(self) -> int:
        """Rows of the global batch that must be read together: those of a lane, 1 without streams."""
        return math.lcm(*(self._rows // stream.lanes for stream in self._streams))

    def _plan(self, order: SampleOrder) -> Iterator[list[Row]]:
        """The rows of each unit, until the sources are used up, which is not before the last step."""
        first, share, after = self._first_row, self._share, self._rows - self._first_row - self._share
        while True:
            order.advance(first)
            mine = [Row(slot, *sample) for slot, sample in enumerate(islice(order, share), first)]
            if len(mine) < share or order.advance(after) < after:
                return
            yield from (mine[part] for part in self._parts)

    def _load(self, order: SampleOrder) -> Generator[Unit]:
        pin = self._device.type == "cuda"
        reader = Reader(self._datasets, self._names, self._rows, self._first_positions)
        if self._job.data.workers:
            return worker_units(reader, self._plan(order), len(self._parts), pin)
        return thread_units(reader, self._plan(order), pin)

    def _to_device(self, unit: Unit) -> Batch:
        return {name: tensor.to(self._device, non_blocking=True) for name, tensor in unit.batch.items()}


def _parts(share: int, workers: int, rows_of_a_lane: int) -> list[slice]:
    """How a process divides its rows of a step among its workers: always alike, and no lane between two of them."""
    lanes = share // rows_of_a_lane
    count = min(max(workers, 1), lanes)
    bounds = [rows_of_a_lane * (lanes * part // count) for part in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(bounds)]


def _joined(batches: Sequence[Batch]) -> Batch:
    if len(batches) == 1:
        return batches[0]
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
