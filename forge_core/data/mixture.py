"""A job's mixture: the order of its samples, whether its sources last, and how they changed since a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Sized
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from forge_core.config.mixture import first_step, is_drawn, phase_weights, source_names
from forge_core.contracts.errors import JobError, Problem
from forge_core.data.order import SampleOrder, whole_shares

if TYPE_CHECKING:
    from forge_core.checkpoint.state import Progress
    from forge_core.contracts.data import Dataset, Stream
    from forge_core.job import Job


def sample_order(job: Job, sizes: Sequence[int | None], progress: Progress | None = None) -> SampleOrder:
    """Returns the order of a job's samples, from its start or from `progress` on."""
    seed = job.job.seed if job.data.seed is None else job.data.seed
    state = progress.samples if progress else None
    return SampleOrder(sizes, source_names(job), phase_shares(job, progress), limits(job, sizes), seed, state)


def sizes_of(datasets: Sequence[Dataset | Stream]) -> list[int | None]:
    """Returns the sequences in each source; None for a stream, whose length is unknown."""
    return [len(dataset) if isinstance(dataset, Sized) else None for dataset in datasets]


def phase_shares(job: Job, progress: Progress | None = None) -> list[tuple[int, list[int]]]:
    """Returns first sample and shares of each phase, beginning with the time before the first one."""
    done = (progress.step, progress.tokens) if progress else (0, 0)
    samples = [sample_of(first_step(phase, job, *done), job, progress) for phase in job.data.phases]
    shares = [whole_shares(weights, job.data.temperature) for weights in phase_weights(job)]
    return list(zip((0, *samples), shares, strict=True))


def sample_of(step: int, job: Job, progress: Progress | None = None) -> int:
    """Returns the number of the first sample after `step` completed steps."""
    # Counted from `progress`: before it, batches may have had another size than the job's.
    done, drawn = (progress.step, progress.samples.get("drawn", 0)) if progress else (0, 0)
    return drawn + (step - done) * job.train.global_batch_size


def limits(job: Job, sizes: Sequence[int | None]) -> list[int | None]:
    """Returns the most sequences that each source yields in the whole run; None if it is not limited."""
    # In decimals: 0.29 epochs of 100 sequences are 29, though as floats they are a little less.
    return [
        math.floor(Fraction(repr(source.max_epochs)) * size) if source.max_epochs and size is not None else None
        for source, size in zip(job.data.sources, sizes, strict=True)
    ]


class Stretch(NamedTuple):
    """The sequences that one phase takes from the sources, as fractions."""

    first: int
    """Number of its first sample."""
    end: int
    """Number of the sample after its last one."""
    taken: list[Fraction]
    """From each source; together less than the phase needs if they are used up."""
    spare: float
    """Sequences that its sources have left; negative if they are used up."""


def stretches(job: Job, sizes: Sequence[int | None], progress: Progress | None = None) -> Iterator[Stretch]:
    """Yields the phases of a run, from its start or from `progress` on."""
    # By arithmetic: a run of a billion samples would take a quarter of an hour to count.
    order = sample_order(job, sizes, progress)
    left = [
        math.inf if limit is None else Fraction(max(0, limit - count))
        for limit, count in zip(limits(job, sizes), order.counts, strict=True)
    ]
    phases = (*phase_shares(job, progress), (sample_of(job.train.steps, job, progress), []))
    for (first, shares), (end, _) in pairwise(phases):
        need = end - max(first, order.drawn)
        if need > 0:
            taken = _pour(shares, left, need)
            spare = float(sum(available for available, share in zip(left, shares, strict=True) if share) - need)
            left = [available - count for available, count in zip(left, taken, strict=True)]
            yield Stretch(end - need, end, taken, spare)


def _pour(shares: Sequence[int], left: Sequence[Fraction | float], need: int) -> list[Fraction]:
    """Returns the sequences from each source, by its share; the others make up for those that are used up."""
    taken = [Fraction(0)] * len(shares)
    missing = Fraction(need)
    while missing and (active := [i for i, share in enumerate(shares) if share and left[i] > taken[i]]):
        total = sum(shares[i] for i in active)
        until_used_up = [(left[i] - taken[i]) * total / shares[i] for i in active if left[i] != math.inf]
        part = Fraction(min([missing, *until_used_up]))
        for i in active:
            taken[i] += part * shares[i] / total
        missing -= part
    return taken


def expected_draws(job: Job, sizes: Sequence[int | None]) -> list[float]:
    """Returns the sequences that a whole run takes from each source, to within a few."""
    return [float(sum(column)) for column in zip(*(stretch.taken for stretch in stretches(job, sizes)), strict=True)]


def check_supply(job: Job, sizes: Sequence[int | None], progress: Progress | None = None) -> None:
    """Check that the sources last to the run's end.

    Raises:
        JobError: a source that is drawn from is empty or too small for one batch, or limits leave too little.
    """
    problems = list(_source_problems(job, sizes))
    if not problems and (shortage := _shortage(job, sizes, progress)):
        problems = [_shortage_problem(job, sizes, progress, *shortage)]
    if problems:
        raise JobError(problems)


def _source_problems(job: Job, sizes: Sequence[int | None]) -> Iterator[Problem]:
    batch = job.train.global_batch_size
    phases = [[batch * share // sum(shares) for share in shares] for _, shares in phase_shares(job)]
    most_in_a_batch = map(max, zip(*phases, strict=True))
    columns = zip(job.data.sources, sizes, limits(job, sizes), most_in_a_batch, strict=True)
    for number, (source, size, limit, most) in enumerate(columns):
        path = f"data.sources.{number}"
        if size == 0 and is_drawn(job, number):
            yield Problem(path, f"holds less than one sequence of {job.train.seq_len} tokens")
        elif size is None and source.max_epochs:
            yield Problem(f"{path}.max_epochs", "is a stream, which has no epochs to count; leave max_epochs out")
        elif limit == 0 and is_drawn(job, number):
            message = f"{source.max_epochs:g} epochs of its {size:,} sequences are less than one sequence"
            yield Problem(f"{path}.max_epochs", f"{message}; raise it, or set weight = 0")
        elif size is not None and size < (most if limit is None else min(most, limit)):
            message = f"has {size:,} sequences, and a step takes {most:,} from it: it would train on some of them twice"
            yield Problem(path, f"{message}; add data, lower train.global_batch_size, or shorten train.seq_len")


def _shortage(job: Job, sizes: Sequence[int | None], progress: Progress | None) -> tuple[Stretch, int] | None:
    """Returns the phase in which sources run out, and the samples that it has by then."""
    phases = list(stretches(job, sizes, progress))
    # Sources are within one sequence of their shares, so with several phases the sum is exact to within a few only.
    # Only if these decide, the run's turns are taken one by one.
    doubt = 2 * len(sizes) * (len(phases) + len(sizes)) if len(phases) > 1 else 0
    if any(abs(phase.spare) < doubt for phase in phases):
        order = sample_order(job, sizes, progress)
        order.advance(phases[-1].end - order.drawn)
        short = next((phase for phase in phases if order.drawn < phase.end), None)
        return (short, order.drawn - short.first) if short else None
    short = next((phase for phase in phases if phase.spare < 0), None)
    return (short, math.floor(sum(short.taken))) if short else None


def _shortage_problem(
    job: Job, sizes: Sequence[int | None], progress: Progress | None, short: Stretch, available: int
) -> Problem:
    batch, need, start = job.train.global_batch_size, short.end - short.first, sample_of(0, job, progress)
    steps = f"steps {(short.first - start) // batch + 1:,} to {(short.end - start) // batch:,}"
    columns = zip(source_names(job), job.data.sources, sizes, limits(job, sizes), strict=True)
    rows = [
        f"{name} {limit:,} in all ({source.max_epochs:g} x {size:,})"
        for name, source, size, limit in columns
        if limit is not None
    ]
    sums = f"{need // batch:,} x {batch:,} = {need:,} sequences, but max_epochs leaves {available:,} for them"
    hint = "raise max_epochs (0 is no limit), give weight to another source, or lower train.steps"
    return Problem("data.sources", f"{steps} need {sums}: {', '.join(rows)}; {hint}")


def source_changes(
    state: Mapping[str, Any], sizes: Mapping[str, int | None], identities: Mapping[str, str] | None = None
) -> list[str]:
    """Returns a message for each difference between the sources and those of a saved state.

    Args:
        state: from `TrainLoader.state()`.
        sizes: sequences of each source by name, None for a stream.
        identities: of the sources that know theirs (see `HasIdentity`).
    """
    saved: Mapping[str, Mapping[str, Any]] = state.get("sources", {})
    new = [f"source {name!r} is new" for name in sizes if saved and name not in saved]
    gone, changed = [], []
    for name, source in saved.items():
        if name not in sizes:
            gone.append(f"source {name!r} is gone, after {source['drawn']:,} sequences")
        elif message := _difference(source, sizes[name], (identities or {}).get(name, "")):
            changed.append(f"source {name!r} {message}")
    return [*new, *gone, *changed]


def _difference(saved: Mapping[str, Any], size: int | None, identity: str) -> str:
    if not saved["drawn"]:  # nothing of it was used, so it may have any size and content
        return ""
    if saved["size"] != size:
        return f"had {saved['size']} sequences and has {size}"
    # Either may be unknown: older checkpoints hold no identities, and not every source has one.
    before = saved.get("identity")
    return "has another content than it had" if before and identity and before != identity else ""
