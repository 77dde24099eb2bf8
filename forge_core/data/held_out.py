"""Held-out sequences of all sources together, shared out over the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from forge_core.contracts.data import BYTES_PER_TOKEN, IGNORED_LABEL, Batch, Dataset, Stream
from forge_core.data.reading import collate
from forge_core.parallel.layout import micro_batches
from forge_core.parallel.mesh import sample_rank

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.job import Job


class Concatenated:
    """The held-out sequences of several sources, one after the other.

    Where every source knows its mean bytes a token, each sequence carries it as entry `BYTES_PER_TOKEN`, so that an
    evaluation weighs the sources by the tokens that it evaluated of each.
    """

    def __init__(self, datasets: Sequence[Dataset]) -> None:
        self._datasets = datasets
        lengths = [len(dataset) for dataset in datasets]
        self._ends = np.cumsum(lengths)
        self.held_out: Dataset | None = None
        rates = [dataset.bytes_per_token for dataset in datasets]
        known = [rate for rate in rates if rate is not None]
        self._all_known = len(known) == len(rates) and any(lengths)
        self.bytes_per_token = float(np.average(known, weights=lengths)) if self._all_known else None

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        number = int(np.searchsorted(self._ends, index, side="right"))
        dataset = self._datasets[number]
        sample = dataset[index - (int(self._ends[number - 1]) if number else 0)]
        return {**sample, BYTES_PER_TOKEN: np.array(dataset.bytes_per_token)} if self._all_known else sample


def held_out(datasets: Sequence[Dataset | Stream]) -> Dataset | None:
    """Held-out sequences of all sources together; None if there are none."""
    parts = [dataset.held_out for dataset in datasets if dataset.held_out is not None and len(dataset.held_out)]
    return Concatenated(parts) if parts else None


def evaluation_batches(dataset: Dataset, count: int, job: Job, context: BuildContext) -> Iterator[Batch]:
    """See `EvaluationContext.batches`."""
    count = min(count or len(dataset), len(dataset))
    # Sources follow one another, so the first `count` sequences would be of the first source alone: spread them evenly.
    drawn = [number * len(dataset) // count for number in range(count)]
    ranks, size = context.layout.data_parallel, micro_batches(job, context.layout)[1]
    rank = sample_rank(context.mesh, context.layout)
    # Every rank yields equally many batches of equal shape, or collectives would hang: ignored rows fill up the last.
    for start in range(0, count, ranks * size):
        first = start + rank * size
        rows = [dataset[index] for index in drawn[first : first + size]]
        batch = collate([*rows, *[_ignored(dataset[0])] * (size - len(rows))])
        yield {name: tensor.to(context.device, non_blocking=True) for name, tensor in batch.items()}


def _ignored(sample: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    return {**sample, "labels": np.full(sample["labels"].shape, IGNORED_LABEL, np.int64)}
