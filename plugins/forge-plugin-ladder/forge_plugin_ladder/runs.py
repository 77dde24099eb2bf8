"""Trains the runs of a ladder, with the runner of `forge-run compare`, and collects their points."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from forge_plugin_ladder.ladder import Planned
from forge_plugin_ladder.points import Point
from forge_plugin_runs.compare.comparison import Comparison
from forge_plugin_runs.compare.grid import Cell, Trial, trial_of
from forge_plugin_runs.compare.results import Outcome, read_outcome

RUNS = "runs"
"""Folder of the run folders, within the ladder's."""


def train(
    runs: Sequence[Planned], base: Path, out: Path, ranks: int, parallel: int, say: Callable[[str], object]
) -> tuple[bool, list[str]]:
    """Train the runs that have not finished.

    Returns:
        Whether all were run, False after an interruption; and the names of those that failed.

    Raises:
        JobError: a job is wrong; nothing was started then.
    """
    comparison = Comparison(out=out, ranks=ranks, parallel=parallel, say=say)
    trials = _trials(runs, base, out)
    completed = comparison.train(trials)
    return completed, [trial.name for trial in trials if comparison.record.entries[trial.name].failed]


def collect(runs: Sequence[Planned], base: Path, out: Path, unique_tokens: float) -> list[Point]:
    """Returns a point for each planned run; one without a loss has the reason."""
    record = Comparison(out=out).record
    points = []
    for run, trial in zip(runs, _trials(runs, base, out), strict=True):
        # With one budget more in the file, its runs are not in the record yet
        entry = record.entries.get(trial.name)
        outcome = read_outcome(trial, out / RUNS / trial.name, entry) if entry else None
        failed = "never started" if outcome is None else _reason(outcome)
        # A loss of a run that diverged is no point of the law, whatever its value
        loss = math.nan
        if outcome is not None and not failed:
            loss = outcome.held_out if outcome.evaluations else outcome.mean_loss
        points.append(
            Point(
                run=trial.name,
                parameters=run.parameters,
                parameters_total=run.parameters_total,
                tokens=run.tokens,
                flops=run.flops,
                loss=loss,
                held_out=bool(outcome and outcome.evaluations),
                budget=run.budget,
                unique_tokens=unique_tokens or math.inf,
                seed=run.seed or 0,
                failed=failed,
            )
        )
    return points


def _reason(outcome: Outcome) -> str:
    """Why a run has no point; empty if it has one."""
    if outcome.failed:
        return f"failed ({outcome.ended})"
    if outcome.ended or not outcome.losses:
        return f"unfinished ({outcome.ended or 'no step'})"
    last = outcome.held_out if outcome.evaluations else outcome.mean_loss
    # Training that ends above its first step has learnt nothing, finite or not
    return "" if math.isfinite(last) and last < outcome.losses[0] else f"diverged (loss {last:.4g})"


def _trials(runs: Sequence[Planned], base: Path, out: Path) -> list[Trial]:
    trials: list[Trial] = []
    for run in runs:
        # Runs that differ in their seed alone are one cell of a comparison
        label = run.name if run.seed is None else run.name.removesuffix(f"-s{run.seed}")
        cell = Cell(job=base, settings=run.settings, label=label)
        seed = "" if run.seed is None else str(run.seed)
        trials.append(trial_of(cell, seed, (), out / RUNS, taken=[trial.name for trial in trials]))
    return trials
