"""The state of a run: what a checkpoint holds of it, and how a freshly built run takes it back, all or only weights."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from forge_core.checkpoint.manager import Checkpoints
from forge_core.checkpoint.resume import FLAG, Start
from forge_core.checkpoint.run_diff import check_tokenizer, describe_changes
from forge_core.checkpoint.run_folder import JOB
from forge_core.checkpoint.state import MODEL, Progress, gather_state, in_folder, in_memory, restore_state
from forge_core.checkpoint.storage import to_json
from forge_core.config.load import dump_job
from forge_core.config.mixture import source_names
from forge_core.contracts.components import Plugin, TrainingHook, state_fields
from forge_core.contracts.contexts import CheckpointContext, Rollback
from forge_core.contracts.errors import CheckpointError, ResumeError, listed
from forge_core.contracts.phase import Phase
from forge_core.contracts.runtime import State
from forge_core.data.loader import identities_of
from forge_core.data.order import sizes_of, source_changes
from forge_core.engine.build import Run
from forge_core.engine.groups import Rates
from forge_core.parallel.mesh import pipeline_group


def snapshot(run: Run, progress: Progress, provenance: Mapping[str, Any]) -> State:
    """All that a checkpoint holds. Reads only: a save, at any step, changes no later loss. Collective."""
    # The schedule's factor alone, by which a continued run notices another schedule: settings come from the job.
    progress.schedule = run.rates.factor(progress.step - 1) if progress.step else None
    state = gather_state(run.model, run.optimizer, progress, _holders(run), pipeline_group(run.context.mesh))
    values = {
        "tokens": progress.tokens,
        "job": dump_job(run.job, run.context.plugins.catalog),
        "provenance": provenance,
    }
    return State(state.tensors, {**values, **state.values})


def restore(start: Start, run: Run, provenance: Mapping[str, Any], echo: Callable[[str], object]) -> Progress:
    """Continue a checkpoint, or take the weights of one, or neither, as specified by `start`. Collective."""
    if start.weights:
        echo("\n".join(_take_weights(start, run)))
    if start.checkpoint is None:
        if (folder := run.context.folder) and (folder / JOB).exists():  # which every run writes before its first step
            echo(f"an earlier run in {folder} ended before its first checkpoint: this one starts from step 0 again")
        return Progress()
    run.hooks.beacon.enter(Phase.LOADING)
    # Checks first: a run that is refused has not read the tensors, which may take minutes.
    check_tokenizer(start.manifest["provenance"], provenance)
    own = _holders(run)
    notes = [*_check_extras(start, own), *_check_sources(start, run)]
    source = in_folder(start.checkpoint, {**start.manifest, "extras": start.extras})
    known = {MODEL + name for name in run.outline.tensors}
    if left := [name for name in source.stored if name.startswith(MODEL) and name not in known]:
        notes.append(f"left behind, since the model has no such tensors now: {listed(left)}")
    progress = restore_state(source, run.model, run.optimizer, own, run.outline.sizes)
    run.hooks("on_checkpoint_load", CheckpointContext(**run.references, step=progress.step, path=start.checkpoint))
    lines = [f"continuing from {start.checkpoint}, step {progress.step}"]
    lines += [f"changed since then:\n{describe_changes(start.changes)}"] if start.changes else []
    if run.job.checkpoint.loads:
        lines.append("[checkpoint.load] has no effect: it is for a run that has no checkpoint yet")
    echo("\n".join([*lines, *notes, *_check_schedule(progress, run.rates)]))
    return progress


def taken(state: State) -> State:
    """A copy of a state, which training does not change: this rank's part of each tensor, on its device."""
    # Through the text format of a checkpoint: the restored values are those that a continued run would have found
    values = json.loads(to_json(state.values))
    return State({name: tensor.detach().clone() for name, tensor in state.tensors.items()}, values)


def go_back(rollback: Rollback, run: Run, checkpoints: Checkpoints) -> Progress:
    """Give a run between two steps an earlier state; returns the progress that it had then. Collective.

    Raises a `CheckpointError` if there is no checkpoint to go back to.
    """
    if rollback.state is not None:
        source = in_memory(rollback.state)
    elif found := checkpoints.newest(rollback.step):
        source = in_folder(*found)
    else:
        before = "" if rollback.step is None else f" of at most {rollback.step} steps"
        raise CheckpointError(
            f"cannot go back ({rollback.reason}): there is no checkpoint{before}; "
            "checkpoint.at_start = true saves one before the first step"
        )
    own = {name: holder for name, holder in _holders(run).items() if holder.rolls_back or rollback.with_data}
    run.optimizer.state.clear()  # of parameters that had none then, which the source does not name
    return restore_state(source, run.model, run.optimizer, own, run.outline.sizes)


def _holders(run: Run) -> dict[str, TrainingHook | Plugin]:
    """Hooks and plugins, which may have state too, by their names in a checkpoint."""
    own = {f"hook:{name}": hook for name, hook in run.hooks.hooks.items()}
    return {**own, **{f"plugin:{name}": plugin for name, plugin in run.context.plugins.active.items()}}


def _check_extras(start: Start, own: Mapping[str, TrainingHook | Plugin]) -> Iterator[str]:
    saved = start.extras
    for name, holder in own.items():
        if name in saved or not _has_state(holder):
            continue
        # No job records hooks from Python, so that the comparison of jobs has not noticed that this one is new.
        if name.startswith("hook:python.") and not start.with_changes:
            raise ResumeError(
                f"{start.checkpoint} holds no state of {name}, which this run has; "
                f"to let it start afresh, continue with resume_with_changes ({FLAG})"
            )
        yield f"{name} starts afresh: the checkpoint has no state of it"
    yield from (f"state of {name} is left behind" for name, state in saved.items() if state and name not in own)


def _has_state(holder: TrainingHook | Plugin) -> bool:
    """Whether a hook or plugin keeps any state: it has state fields, or its own way to save state."""
    return bool(state_fields(type(holder))) or type(holder).state_dict is not TrainingHook.state_dict


def _check_sources(start: Start, run: Run) -> list[str]:
    sizes = dict(zip(source_names(run.job), sizes_of(run.datasets), strict=True))
    saved = start.manifest["progress"]["samples"]
    if (changes := source_changes(saved, sizes, identities_of(run.job, run.datasets))) and not start.with_changes:
        raise ResumeError(
            f"the data is not the same as in {start.checkpoint}: {'; '.join(changes)}; "
            f"to continue all the same, run the same command with {FLAG}"
        )
    return changes


def _check_schedule(progress: Progress, rates: Rates) -> Iterator[str]:
    before, step = progress.schedule, progress.step
    if before is not None and not math.isclose(now := rates.factor(step - 1), before, rel_tol=1e-6, abs_tol=1e-9):
        yield (
            f"the schedule is another one for updates that were made already: update {step} had {before:.4g} of the "
            f"base rate and would have {now:.4g} by this job; the next has {rates.factor(step):.4g}"
        )


def _take_weights(start: Start, run: Run) -> Iterator[str]:
    """Load what the tables of `[checkpoint.load]` name, and yield lines about it."""
    tables: dict[str, str] = {}
    for table, found in start.weights.items():
        names, lines = run.job.checkpoint.loads[table].load(found, table, run.context, run.model, run.outline)
        # Which of two values stays would be a matter of the order of tables
        if both := [name for name in names if name in tables]:
            raise ResumeError(
                f"[{tables[both[0]]}] and [{table}] both load {listed(both)}; exclude these from one of them"
            )
        tables |= dict.fromkeys(names, table)
        yield from lines
