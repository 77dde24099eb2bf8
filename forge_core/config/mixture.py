"""The mixture of sources as specified by a job: names, weights and phases, and the problems with them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from forge_core.contracts.errors import LEFT_OUT, Problem, did_you_mean
from forge_core.job import Job, Phase


def source_names(job: Job) -> list[str]:
    """The name of each source: its own, or else its number."""
    return [source.name or str(number) for number, source in enumerate(job.data.sources)]


def weights_over_time(weights: Mapping[str, float], phases: Iterable[Mapping[str, float]]) -> list[dict[str, float]]:
    """Weights of the sources before any phase begins, and in each phase, of which `phases` has the `weights`."""
    # A source that a phase does not name keeps the weight it had
    return [*accumulate(map(dict, phases), lambda before, phase: before | phase, initial=dict(weights))]


def phase_weights(job: Job) -> list[list[float]]:
    """Weights of the sources before any phase begins, and in each phase."""
    weights = dict(zip(source_names(job), (source.weight for source in job.data.sources), strict=True))
    return [[*now.values()] for now in weights_over_time(weights, (phase.weights for phase in job.data.phases))]


def is_drawn(job: Job, number: int) -> bool:
    """Whether source `number` has a weight at any time."""
    return any(weights[number] for weights in phase_weights(job))


def first_step(phase: Phase, job: Job, step: int = 0, tokens: int = 0, sample: int = 0) -> int:
    """Completed steps after which a phase begins, if `step` steps were fed `tokens` positions, and `sample` is next."""
    if phase.start_step is not None:
        return phase.start_step
    # Counted from `step`, as earlier batches may have had a different size from the job's. Rounded up (the floor of the
    # negative): a phase begins with the first step that starts at or after its tokens.
    left = -((tokens - (phase.start_tokens or 0)) // job.train.seq_len)
    return step + job.train.steps_until(sample + left, sample)


def lr_factor(job: Job, step: int, tokens: int) -> float:
    """The phase's factor on the learning rate, after `step` completed steps and `tokens` positions fed."""
    begun = [phase.lr_factor for phase in job.data.phases if step >= first_step(phase, job, step, tokens)]
    return begun[-1] if begun else 1.0


def mixture_problems(job: Job) -> Iterator[Problem]:
    """Mistakes in sources and phases that show without reading any data."""
    if not job.data.sources:
        yield Problem("data.sources", "there must be at least one source")
        return
    yield from _source_problems(job)
    # That nothing is drawn follows from such a mistake, where there is one
    yield from [*_weight_problems(job), *_phase_problems(job)] or _nothing_drawn(job)


def _source_problems(job: Job) -> Iterator[Problem]:
    names = source_names(job)
    for number, name in enumerate(names):
        if name in names[:number]:
            yield Problem(
                f"data.sources.{number}.name",
                f"{name!r} is the name of data.sources.{names.index(name)} too; names must differ, and a source "
                "without one is called by its number",
            )


def _weight_problems(job: Job) -> Iterator[Problem]:
    names = source_names(job)
    for number, phase in enumerate(job.data.phases):
        for name, weight in phase.weights.items():
            path = f"data.phases.{number}.weights.{name}"
            if name not in names:
                hint = did_you_mean(name, names) or f"; there are {', '.join(names)}"
                yield Problem(path, f"no source has this name{hint}")
            if weight < 0:
                yield Problem(path, f"must be >= 0, got {weight}")


def _phase_problems(job: Job) -> Iterator[Problem]:
    steps = job.train.steps
    before, before_path = -1, ""
    for number, phase in enumerate(job.data.phases):
        path = f"data.phases.{number}"
        if (phase.start_step is None) == (phase.start_tokens is None):
            given = "both are given" if phase.start_tokens is not None else "neither is given"
            yield Problem(path, f"a phase begins at start_step or at start_tokens, but {given}; give one of them")
            continue
        first = first_step(phase, job)
        key = f"{path}.{'start_step' if phase.start_step is not None else 'start_tokens'}"
        if first >= steps:
            yield Problem(
                key,
                f"the phase would begin after {first:,} steps and never act: train.steps is {steps:,}",
                fits=LEFT_OUT,
            )
        if first <= before:
            yield Problem(
                key,
                f"the phase would begin after {first:,} steps, but {before_path} begins after {before:,}; phases stand "
                "in the order in which they begin, each at another step",
            )
        before, before_path = first, path


def _nothing_drawn(job: Job) -> Iterator[Problem]:
    paths = ["data.sources", *(f"data.phases.{number}.weights" for number in range(len(job.data.phases)))]
    for path, weights in zip(paths, phase_weights(job), strict=True):
        if not any(weights):
            extent = "" if path == "data.sources" else " from here on"
            yield Problem(
                path, f"every weight is 0{extent}, so nothing would be drawn; give one source a positive weight"
            )
