"""Trains the runs of a ladder, with the runner of `forge-run compare`, and collects their points."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from attrs import evolve

from forge_core import read_metrics
from forge_core.checkpoint.run_folder import RunFolder, storage_of
from forge_core.checkpoint.storage import read_manifest
from forge_core.contracts.errors import ExitCode, JobError
from forge_plugin_ladder.ladder import Ladder
from forge_plugin_ladder.planned import Planned
from forge_plugin_ladder.points import Point
from forge_plugin_ladder.trunk import trunk_settings
from forge_plugin_runs.compare.comparison import Comparison
from forge_plugin_runs.compare.grid import Cell, Trial, check_jobs, trial_of
from forge_plugin_runs.compare.results import Outcome, read_outcome

LOSS = "eval/loss"
RUNS = "runs"
"""Folder of the run folders, within the ladder's."""


def train(
    runs: Sequence[Planned],
    base: Path,
    out: Path,
    ranks: int,
    parallel: int,
    is_branching: bool,
    say: Callable[[str], object],
) -> tuple[bool, list[str]]:
    """Train the runs that have not finished; with `is_branching`, trunks first and then what branches from them.

    Returns:
        Whether all were run, False after an interruption; and the names of those that failed.

    Raises:
        JobError: a job is wrong; nothing was started then.
    """
    comparison = Comparison(out=out, ranks=ranks, parallel=parallel, say=say)
    trials = trials_of(runs, base, out, is_branching)
    if is_branching:
        # All jobs before any run: a branch would otherwise be refused hours later
        trials, _ = check_jobs(trials, ranks)
    # What SLURM has finished is not trained again
    settle(comparison, trials)
    places = {run.name: out / RUNS / trial.name for run, trial in zip(runs, trials, strict=True)}
    whole = [trial for run, trial in zip(runs, trials, strict=True) if not (is_branching and run.trunk)]
    completed = comparison.train(whole)
    if completed and len(whole) < len(trials):
        entries = comparison.record.entries
        completed = comparison.train(
            [
                trial
                # Of a branch that has finished, the trunk may be gone
                if trial.name in entries and entries[trial.name].digest == trial.digest
                else start_of(trial, run, places[run.trunk], say)
                for run, trial in zip(runs, trials, strict=True)
                if run.trunk
            ]
        )
    failed = [trial.name for trial in trials if (entry := comparison.record.entries.get(trial.name)) and entry.failed]
    return completed, failed


def start_of(trial: Trial, run: Planned, trunk: Path, say: Callable[[str], object]) -> Trial:
    """Returns a branch with the checkpoint of its trunk, a run folder, to start from."""
    storage = storage_of(trunk)
    steps = [step for step in storage.steps() if step <= run.branch_step]
    # An earlier checkpoint, or none, is the same run with more steps: a trunk may have failed, or have
    # finished before this budget was added
    if run.branch_step not in steps:
        start = f"step {max(steps)}" if steps else "its first step"
        say(f"{run.name}: {run.trunk} has no checkpoint of step {run.branch_step}, so it is trained from {start} on")
    return evolve(trial, arguments=("--resume", str(storage.path(max(steps))))) if steps else trial


def settle(comparison: Comparison, trials: Sequence[Trial]) -> None:
    """Record how queued runs have ended; one without an end since then stays queued."""
    changed = False
    for trial in trials:
        entry = comparison.record.entries.get(trial.name)
        if entry is None or not entry.queued or entry.digest:
            continue
        end = RunFolder(comparison.out / RUNS / trial.name).end()
        # An earlier end is of an attempt before
        if end is None or end.ended < entry.queued_at:
            continue
        changed = True
        entry.failed = end.code not in (ExitCode.FINISHED, ExitCode.STOPPED)
        entry.ended = f"exit code {end.code}" if entry.failed else "interrupted"
        if end.code == ExitCode.FINISHED:
            entry.digest, entry.ended = entry.queued, ""
    if changed:
        comparison.record.write()


def collect(runs: Sequence[Planned], base: Path, out: Path, ladder: Ladder) -> list[Point]:
    """Returns a point for each planned run; one without a loss has the reason."""
    comparison = Comparison(out=out)
    trials = {run.name: trial for run, trial in zip(runs, trials_of(runs, base, out, ladder.trunk), strict=True)}
    settle(comparison, [*trials.values()])
    record = comparison.record
    # With one budget more in the file, its runs are not in the record yet
    outcomes = {
        name: read_outcome(trial, out / RUNS / trial.name, record.entries[trial.name])
        for name, trial in trials.items()
        if trial.name in record.entries
    }
    points = []
    for run in runs:
        outcome = outcomes.get(run.name)
        if outcome is not None and run.trunk in outcomes:
            outcome = _whole(outcome, outcomes[run.trunk])
        point = Point(
            run=trials[run.name].name,
            parameters=run.parameters,
            parameters_total=run.parameters_total,
            tokens=run.tokens,
            flops=run.flops,
            held_out=bool(outcome and outcome.evaluations) or ladder.metric != LOSS,
            budget=run.budget,
            seed=run.seed or 0,
            trunk=trials[run.trunk].name if run.trunk else "",
            tuned=dict(run.tuned),
            factors=dict(run.factors),
            failed="never started" if outcome is None else reason(outcome),
        )
        # A loss of a run that diverged is no point of the law, whatever its value
        points.append(point if point.failed or outcome is None else _measured(point, outcome, run, ladder))
    return points


def _measured(point: Point, outcome: Outcome, run: Planned, ladder: Ladder) -> Point:
    """A point with what its run measured at its end."""
    names = {name: key for name, key in (("loss", ladder.metric), ("accuracy", ladder.accuracy)) if key}
    values = {name: last_value(outcome.folder, key, run.steps) for name, key in names.items()}
    if ladder.metric == LOSS and not outcome.evaluations:
        values["loss"] = outcome.mean_loss
    if missing := [names[name] for name, value in values.items() if not math.isfinite(value)]:
        return evolve(point, failed=f"no {missing[0]} in its last evaluation")
    return evolve(
        point,
        loss=values["loss"],
        accuracy=values.get("accuracy", math.nan),
        unique_tokens=ladder.unique_tokens or counted_tokens(outcome.folder, run),
    )


def last_value(run: Path, name: str, step: int) -> float:
    """Returns a metric of the evaluation after the last step; NaN if that has none."""
    steps, values = read_metrics(run).evaluations.column(name)
    return float(values[-1]) if len(steps) and steps[-1] == step else math.nan


def counted_tokens(folder: Path, run: Planned) -> float:
    """Returns the tokens of a run that are not repeated, as its last checkpoint counts sequences; infinite if all are.

    Raises:
        JobError: it has no checkpoint.
    """
    storage = storage_of(folder)
    if not (steps := storage.steps()):
        raise JobError(f"{folder} has no checkpoint, which counts repeated sequences; set unique_tokens in the ladder")
    # Of each source separately: one of a mixture may be repeated many times, and another not read to its end
    sources = read_manifest(storage.path(max(steps)))["progress"]["samples"]["sources"].values()
    drawn = sum(source["drawn"] for source in sources)
    # A stream has no size, and is not repeated
    unique = sum(
        source["drawn"] if source["size"] is None else min(source["drawn"], source["size"]) for source in sources
    )
    return math.inf if unique == drawn else run.tokens * unique / drawn


def _whole(branch: Outcome, trunk: Outcome) -> Outcome:
    """A branch with the steps of its trunk before its own, as a separate run has them in its metrics."""
    # By tokens and not by `branch_step`: a branch may have started from an earlier checkpoint
    first = branch.tokens[0] if branch.tokens else math.inf
    before = sum(tokens < first for tokens in trunk.tokens)
    return evolve(
        branch,
        tokens=[*trunk.tokens[:before], *branch.tokens],
        losses=[*trunk.losses[:before], *branch.losses],
    )


def reason(outcome: Outcome) -> str:
    """Returns why a run has no result; empty if it has one."""
    if outcome.failed:
        return f"failed ({outcome.ended})"
    if outcome.ended or not outcome.losses:
        return f"unfinished ({outcome.ended or 'no step'})"
    last = outcome.held_out if outcome.evaluations else outcome.mean_loss
    # Training that ends above its first step has learnt nothing, finite or not
    return "" if math.isfinite(last) and last < outcome.losses[0] else f"diverged (loss {last:.4g})"


def trials_of(runs: Sequence[Planned], base: Path, out: Path, is_branching: bool) -> list[Trial]:
    """Returns the runs as `compare` trains them."""
    trials: list[Trial] = []
    for run in runs:
        # Runs that differ in their seed alone are one cell of a comparison
        label = run.name if run.seed is None else run.name.removesuffix(f"-seed-{run.seed}")
        settings = {**run.settings, **(trunk_settings(run) if is_branching else {})}
        cell = Cell(job=base, settings=settings, label=label)
        seed = "" if run.seed is None else str(run.seed)
        trials.append(trial_of(cell, seed, (), out / RUNS, taken=[trial.name for trial in trials]))
    return trials
