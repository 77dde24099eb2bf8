"""From the mixture that a job states to the order of its samples."""

from __future__ import annotations

import math
from collections.abc import Sequence, Sized
from fractions import Fraction
from typing import TYPE_CHECKING

from forge_core.config.mixture import first_step, phase_weights, source_names
from forge_core.data.order import SampleOrder
from forge_core.data.turns import whole_shares

if TYPE_CHECKING:
    from forge_core.checkpoint.state import Progress
    from forge_core.config.job import Job
    from forge_core.contracts.data import Dataset, Stream


def sample_order(job: Job, sizes: Sequence[int | None], progress: Progress | None = None) -> SampleOrder:
    """The order of a job's samples, from its start or from where `progress` says."""
    seed = job.job.seed if job.data.seed is None else job.data.seed
    state = progress.samples if progress else None
    return SampleOrder(sizes, source_names(job), phase_shares(job, progress), limits(job, sizes), seed, state)


def sizes_of(datasets: Sequence[Dataset | Stream]) -> list[int | None]:
    """Sequences in each source; None for a stream, whose length nobody knows."""
    return [len(dataset) if isinstance(dataset, Sized) else None for dataset in datasets]


def phase_shares(job: Job, progress: Progress | None = None) -> list[tuple[int, list[int]]]:
    """The first sample and the shares of each phase, the time before the first one included."""
    done = (progress.step, progress.tokens) if progress else (0, 0)
    samples = [sample_of(first_step(phase, job, *done), job, progress) for phase in job.data.phases]
    shares = [whole_shares(weights, job.data.temperature) for weights in phase_weights(job)]
    return list(zip((0, *samples), shares, strict=True))


def sample_of(step: int, job: Job, progress: Progress | None = None) -> int:
    """Number of the first sample after `step` completed steps.

    Args:
        progress: how far the run is. Until there, batches may have had another size than the job says.
    """
    done, drawn = (progress.step, progress.samples.get("drawn", 0)) if progress else (0, 0)
    return drawn + (step - done) * job.train.global_batch_size


def limits(job: Job, sizes: Sequence[int | None]) -> list[int | None]:
    """How many sequences each source gives in all; None if it is not limited."""
    return [_limit(source.max_epochs, size) for source, size in zip(job.data.sources, sizes, strict=True)]


def _limit(epochs: float, size: int | None) -> int | None:
    """In decimals: 0.29 epochs of 100 sequences are 29, though as floats they are a little less."""
    return math.floor(Fraction(repr(epochs)) * size) if epochs and size is not None else None
