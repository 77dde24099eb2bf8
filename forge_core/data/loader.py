"""From sample numbers to micro-batches on the device, loaded in the background."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from forge_core.data.order import Sample, SampleOrder
from forge_core.parallel.layout import micro_batches
from forge_core.parallel.mesh import sample_rank
from forge_core.protocols import IGNORED_LABEL, Batch, Dataset

if TYPE_CHECKING:
    from forge_core.config.job import Job
    from forge_core.context import BuildContext

STEPS_AHEAD = 2
"""Steps that the background thread loads ahead."""


class Sources:
    """All sources of a job, read by (source, index)."""

    def __init__(self, datasets: Sequence[Dataset]) -> None:
        self.datasets = datasets

    def __getitem__(self, samples: Sequence[Sample]) -> Batch:
        """The micro-batch of these samples, with `sources` (B,): the number of the source of each sequence."""
        batch = collate([self.datasets[sample.source][sample.number] for sample in samples])
        batch["sources"] = torch.tensor([sample.source for sample in samples])
        return batch


def collate(samples: Sequence[Mapping[str, np.ndarray]]) -> Batch:
    """Stack samples; integers become int64."""
    return {name: _stack([sample[name] for sample in samples]) for name in samples[0]}


def _stack(arrays: Sequence[np.ndarray]) -> Tensor:
    stacked = np.stack(arrays)
    return torch.from_numpy(stacked.astype(np.int64) if np.issubdtype(stacked.dtype, np.integer) else stacked)


class TrainLoader:
    """This rank's micro-batches of each step, from a given position on.

    `workers = 0` loads in a background thread, which suits memory-mapped data; more load in as many processes. Either
    way the order is that of `SampleOrder`, and the position is what was handed out, not what was loaded ahead.
    """

    def __init__(
        self, job: Job, datasets: Sequence[Dataset], context: BuildContext, counts: Sequence[int] = ()
    ) -> None:
        self._job = job
        self._device = context.device
        self._sources = Sources(datasets)
        self._micro_batches, self._size = micro_batches(job, context.layout)
        self._rank = sample_rank(context.mesh, context.layout)
        self._start = self._order(datasets, counts)
        self._handed_out = 0
        self._batches = self._load(self._order(datasets, counts))

    def _order(self, datasets: Sequence[Dataset], counts: Sequence[int]) -> SampleOrder:
        data = self._job.data
        seed = self._job.job.seed if data.seed is None else data.seed
        return SampleOrder([len(d) for d in datasets], [source.weight for source in data.sources], seed, counts)

    def next_step(self) -> list[Batch]:
        """The micro-batches of the next step, on the device.

        Raises:
            Exception: whatever reading a sample raised, with the source and index in a note.
        """
        batches = [next(self._batches) for _ in range(self._micro_batches)]
        self._handed_out += self._job.train.global_batch_size
        return [{name: t.to(self._device, non_blocking=True) for name, t in batch.items()} for batch in batches]

    def counts(self) -> list[int]:
        """Samples handed out so far of each source, over all ranks: the position to continue from."""
        self._start.advance(self._handed_out)
        self._handed_out = 0
        return list(self._start.counts)

    def close(self) -> None:
        """Stop loading."""
        self._batches.close()

    def _plan(self, order: SampleOrder) -> Iterator[list[Sample]]:
        """The samples of each of this rank's micro-batches, without end."""
        share = self._micro_batches * self._size
        while True:
            step = [next(order) for _ in range(self._job.train.global_batch_size)]
            mine = step[self._rank * share : (self._rank + 1) * share]
            for start in range(0, share, self._size):
                yield mine[start : start + self._size]

    def _load(self, order: SampleOrder) -> Any:
        pin = self._device.type == "cuda"
        if self._job.data.workers:
            return _worker_batches(self._sources, self._plan(order), self._job.data.workers, pin)
        return _thread_batches(self._sources, self._plan(order), STEPS_AHEAD * self._micro_batches, pin)


def _read(sources: Sources, samples: Sequence[Sample]) -> Batch:
    try:
        return sources[samples]
    except Exception as error:
        error.add_note(f"while reading samples {[tuple(sample) for sample in samples]} (source, index)")
        raise


def _thread_batches(sources: Sources, plan: Iterator[list[Sample]], ahead: int, pin: bool) -> Iterator[Batch]:
    ready: queue.Queue[Batch | Exception] = queue.Queue(maxsize=ahead)
    stop = threading.Event()

    def put(item: Batch | Exception) -> None:
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return

    def work() -> None:
        for samples in plan:
            if stop.is_set():
                return
            try:
                batch = _read(sources, samples)
            except Exception as error:
                put(error)
                return
            put({name: t.pin_memory() for name, t in batch.items()} if pin else batch)

    threading.Thread(target=work, name="forge-data", daemon=True).start()
    try:
        while True:
            item = ready.get()
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        stop.set()


class _Reader(torch.utils.data.Dataset[Any]):
    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def __getitem__(self, samples: Any) -> Batch:
        return _read(self._sources, samples)


def _worker_batches(sources: Sources, plan: Iterator[list[Sample]], workers: int, pin: bool) -> Iterator[Batch]:
    loader = torch.utils.data.DataLoader(
        _Reader(sources),
        sampler=plan,  # each "index" is a micro-batch
        batch_size=None,
        num_workers=workers,
        pin_memory=pin,
        persistent_workers=False,
    )
    yield from loader


class Concatenated:
    """The held-out sequences of several sources, one after the other. None where no source has any."""

    def __init__(self, datasets: Sequence[Dataset]) -> None:
        self._datasets = datasets
        self._ends = np.cumsum([len(dataset) for dataset in datasets])
        self.held_out: Dataset | None = None
        rates = [dataset.bytes_per_token for dataset in datasets]
        known = [rate for rate in rates if rate is not None]
        lengths = [len(dataset) for dataset in datasets]
        complete = len(known) == len(rates)
        self.bytes_per_token = float(np.average(known, weights=lengths)) if complete and any(lengths) else None

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        number = int(np.searchsorted(self._ends, index, side="right"))
        return self._datasets[number][index - (int(self._ends[number - 1]) if number else 0)]


def held_out(datasets: Sequence[Dataset]) -> Dataset | None:
    """Held-out sequences of all sources together; None if there are none."""
    parts = [dataset.held_out for dataset in datasets if dataset.held_out is not None and len(dataset.held_out)]
    return Concatenated(parts) if parts else None


def evaluation_batches(dataset: Dataset, count: int, job: Job, context: BuildContext) -> Iterator[Batch]:
    """See `EvaluationContext.batches`."""
    count = min(count or len(dataset), len(dataset))
    ranks, size = context.layout.data_parallel, micro_batches(job, context.layout)[1]
    rank = sample_rank(context.mesh, context.layout)
    for start in range(0, count, ranks * size):
        first = start + rank * size
        rows = [dataset[index] for index in range(first, min(first + size, count))]
        batch = collate([*rows, *[_ignored(dataset[0])] * (size - len(rows))])
        yield {name: tensor.to(context.device, non_blocking=True) for name, tensor in batch.items()}


def _ignored(sample: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    return {**sample, "labels": np.full(sample["labels"].shape, IGNORED_LABEL, np.int64)}
