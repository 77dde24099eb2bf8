"""The state of a run: what a checkpoint holds of it, and how a freshly built run takes it back, all or only weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from forge_core.checkpoint.job_diff import describe_changes
from forge_core.checkpoint.manager import State
from forge_core.checkpoint.provenance import check_tokenizer
from forge_core.checkpoint.resume import FLAG, Start
from forge_core.checkpoint.state import Progress, gather_state, has_state, holders, restore_state
from forge_core.config.dump import dump_job
from forge_core.config.mixture import source_names
from forge_core.contracts.errors import CheckpointError
from forge_core.data.loader import identities_of
from forge_core.data.mixture import sizes_of
from forge_core.data.order import source_changes
from forge_core.engine.weights import load_weights
from forge_core.parallel.mesh import pipeline_group

if TYPE_CHECKING:
    from forge_core.contracts.components import Plugin, TrainingHook
    from forge_core.engine.build import Run
    from forge_core.engine.hooks import Contexts
    from forge_core.engine.rates import Rates


def snapshot(run: Run, progress: Progress, provenance: Mapping[str, Any]) -> State:
    """All that a checkpoint holds. Taking it changes nothing. Collective over the ranks of a pipeline.

    Args:
        progress: receives the factor of the schedule, by which a continued run notices another schedule.
    """
    progress.schedule = run.rates.factor(progress.step - 1) if progress.step else None
    plugins, pipeline = run.context.plugins, pipeline_group(run.context.mesh)
    state = gather_state(run.model, run.optimizer, progress, run.hooks.hooks, plugins.active, pipeline)
    values = {"tokens": progress.tokens, "job": dump_job(run.job, plugins.catalog), "provenance": provenance}
    return State(state.tensors, {**values, **state.values})


def restore(
    start: Start, run: Run, provenance: Mapping[str, Any], contexts: Contexts, echo: Callable[[str], object]
) -> Progress:
    """Continue a checkpoint, or take the weights of one, or neither, as `start` says. Collective.

    Raises:
        CheckpointError: it does not fit what was built.
        JobError: `[checkpoint.load]` does not fit the model.
    """
    if start.weights is not None:
        echo(take_weights(start, run, provenance))
    if start.checkpoint is None:
        return Progress()
    run.hooks.beacon.enter("loading the checkpoint")
    progress, report = continue_run(start, run, provenance)
    run.hooks("on_checkpoint_load", contexts.checkpoint(progress.step, start.checkpoint))
    echo(report)
    return progress


def continue_run(start: Start, run: Run, provenance: Mapping[str, Any]) -> tuple[Progress, str]:
    """Load the checkpoint into a freshly built run; returns how far it was, and a report for the user. Collective.

    Raises:
        CheckpointError: it does not fit what was built.
    """
    assert start.checkpoint is not None
    check_tokenizer(start.manifest["provenance"], provenance)
    own = dict(holders(run.hooks.hooks, run.context.plugins.active))
    notes = [*check_extras(start, own), *check_sources(start, run)]
    manifest = {**start.manifest, "extras": start.extras}
    progress = restore_state(start.checkpoint, manifest, run.model, run.optimizer, own, run.outline.sizes)
    lines = [f"continuing from {start.checkpoint}, step {progress.step}"]
    lines += [f"changed since then:\n{describe_changes(start.changes)}"] if start.changes else []
    if run.job.checkpoint.load is not None:
        lines.append("[checkpoint.load] has no effect: it is for a run that has no checkpoint yet")
    return progress, "\n".join([*lines, *notes, *check_schedule(progress, run.rates)])


def check_extras(start: Start, own: Mapping[str, TrainingHook | Plugin]) -> Iterator[str]:
    """How the state of hooks and plugins in the checkpoint differs from what the run has, in words.

    Raises:
        CheckpointError: a hook given from Python, which no job records, has no state there.
    """
    saved = start.extras
    for name, holder in own.items():
        if name in saved or not has_state(holder):
            continue
        if name.startswith("hook:python.") and not start.with_changes:
            fix = f"to let it start afresh, continue with resume_with_changes ({FLAG})"
            raise CheckpointError(f"{start.checkpoint} holds no state of {name}, which this run has; {fix}")
        yield f"{name} starts afresh: the checkpoint has no state of it"
    yield from (f"state of {name} is left behind" for name, state in saved.items() if state and name not in own)


def check_sources(start: Start, run: Run) -> list[str]:
    """How the sources of data differ from those that the checkpoint counts the samples of, in words.

    Raises:
        CheckpointError: they do, and the user has not asked to continue with changes.
    """
    sizes = dict(zip(source_names(run.job), sizes_of(run.datasets), strict=True))
    identities = identities_of(run.job, run.datasets)
    changes = source_changes(start.manifest["progress"]["samples"], sizes, identities)
    if changes and not start.with_changes:
        fix = f"to continue all the same, run the same command with {FLAG}"
        raise CheckpointError(f"the data is not that of {start.checkpoint}: {'; '.join(changes)}; {fix}")
    return changes


def check_schedule(progress: Progress, rates: Rates) -> Iterator[str]:
    """Whether updates that were made already would have another rate by the present schedule, in words: a decay that
    begins before the checkpoint, say, makes the rate jump here."""
    before = progress.schedule
    if before is None:
        return
    now = rates.factor(progress.step - 1)
    if not math.isclose(now, before, rel_tol=1e-6, abs_tol=1e-9):
        before_and_now = (
            f"update {progress.step} had {before:.4g} of the base rate and would have {now:.4g} by this job"
        )
        following = f"the next has {rates.factor(progress.step):.4g}"
        yield f"the schedule is another one for updates that were made already: {before_and_now}; {following}"


def take_weights(start: Start, run: Run, provenance: Mapping[str, Any]) -> str:
    """Load the weights that `[checkpoint.load]` selects; returns a report for the user. Collective.

    Raises:
        JobError: a pattern fits nothing.
        CheckpointError: the weights do not fit the model.
    """
    section, recorded = run.job.checkpoint.load, start.manifest["provenance"]
    assert section is not None
    assert start.weights is not None
    selection = load_weights(start.weights, section, run.model, run.outline)
    report = f"weights from {start.weights}, step {start.manifest['step']}:\n{selection}"
    if recorded.get("tokenizer") != provenance.get("tokenizer"):
        report += "\n  they were trained with another tokenizer: token ids mean other texts now"
    return report
