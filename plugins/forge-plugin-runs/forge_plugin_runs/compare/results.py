"""Results of the runs of a comparison, and their table."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from attrs import frozen

from forge_core import read_metrics
from forge_kit.tools.metrics import Metrics
from forge_kit.tools.run_owner import metrics_file
from forge_plugin_runs.compare.grid import Cell, Trial
from forge_plugin_runs.compare.record import Entry
from forge_plugin_runs.final_loss import MEAN_NAME, final_loss, mean_of_last

Order = Literal["held_out", "mean_loss"]
"""What rows are ordered by."""


@frozen(kw_only=True)
class Outcome:
    """One run."""

    trial: Trial
    folder: Path
    ended: str
    """Why it has not finished; empty if it has."""
    failed: bool = False
    step: int
    """The last step."""
    tokens: Sequence[float]
    """Positions fed, at each step that has a line of metrics."""
    losses: Sequence[float]
    """Training loss of these steps."""
    evaluations: Mapping[int, float]
    """Held-out losses by step, in order; none if the job does not evaluate."""
    step_seconds: float
    """Median wall time of a step; NaN without one."""
    cpu_seconds: float = math.nan
    """Of all its processes; NaN where it is not known, as of a run that `compare` did not start."""
    peak_memory: float = math.nan
    """Bytes of its largest process; NaN likewise."""

    @property
    def loss(self) -> float:
        """Training loss of the last step."""
        return final_loss(self.losses)

    @property
    def mean_loss(self) -> float:
        """Training loss, a mean over the last twentieth of the steps."""
        return mean_of_last(self.losses)

    @property
    def held_out(self) -> float:
        """Held-out loss of the last evaluation; NaN if there is none."""
        return [math.nan, *self.evaluations.values()][-1]

    @property
    def fed(self) -> float:
        """Positions fed in all."""
        return self.tokens[-1] if self.tokens else 0.0


def read_outcome(trial: Trial, folder: Path, entry: Entry | None = None) -> Outcome:
    """Read the results of a run from its folder; one that has not begun has none."""
    metrics = read_metrics(folder) if metrics_file(folder).is_file() else Metrics()
    seconds = metrics.column("step_seconds")[1]
    evaluated, held_out = metrics.evaluations.column("eval/loss")
    known: dict[str, Any] = {}
    if entry is not None and entry.cpu_seconds:
        known = {"cpu_seconds": entry.cpu_seconds, "peak_memory": float(entry.peak_memory)}
    return Outcome(
        trial=trial,
        folder=folder,
        ended=entry.ended if entry else "",
        failed=entry.failed if entry else False,
        step=metrics[-1]["step"] if metrics else 0,
        tokens=metrics.column("tokens")[1].astype(float).tolist(),
        losses=metrics.column("loss")[1].astype(float).tolist(),
        evaluations=dict(zip(evaluated.tolist(), held_out.astype(float).tolist(), strict=True)),
        step_seconds=statistics.median(seconds.tolist()) if len(seconds) else math.nan,
        **known,
    )


@frozen(kw_only=True)
class CellResult:
    """A row of the comparison: all runs of a cell that have got equally far."""

    cell: Cell
    outcomes: Sequence[Outcome]
    by: Order
    """What rows are ordered by."""

    @property
    def score(self) -> float:
        """Mean over the seeds of what rows are ordered by."""
        return self.mean(self.by)

    @property
    def ended(self) -> str:
        """Why its runs have not finished; empty if they have."""
        return self.outcomes[0].ended

    def mean(self, name: str) -> float:
        """Over the seeds."""
        return statistics.fmean(getattr(outcome, name) for outcome in self.outcomes)

    def spread(self, name: str) -> float:
        """Standard deviation over the seeds; NaN of one."""
        values = [getattr(outcome, name) for outcome in self.outcomes]
        return statistics.stdev(values) if len(values) > 1 else math.nan


def rows_of(outcomes: Sequence[Outcome]) -> list[CellResult]:
    """Best first: finished rows, then those that ended earlier, the longest first. Losses that are not finite: last.

    By the held-out loss where every finished run has one, else by the mean training loss of the last steps: the loss
    of one step depends on its batch.
    """
    usable = [outcome for outcome in outcomes if not outcome.failed and outcome.losses]
    # Unfinished runs may not have been evaluated yet; they decide only if none has finished
    decisive = [outcome for outcome in usable if not outcome.ended] or usable
    by: Order = "held_out" if all(outcome.evaluations for outcome in decisive) else "mean_loss"
    cells: dict[tuple[str, str, str], list[Outcome]] = {}
    for outcome in usable:
        cell = outcome.trial.cell
        # With the reason of the end: a mean over runs of different lengths would compare nothing
        cells.setdefault((str(cell.job), cell.label, outcome.ended), []).append(outcome)
    rows = [CellResult(cell=own[0].trial.cell, outcomes=own, by=by) for own in cells.values()]
    return sorted(rows, key=lambda row: (bool(row.ended), -_steps(row), not math.isfinite(row.score), row.score))


def _steps(row: CellResult) -> float:
    return row.mean("step") if row.ended else 0.0  # finished ones are ordered by their loss alone


def best_of(rows: Sequence[CellResult]) -> float:
    """The score that others are compared with: of the first row."""
    return rows[0].score if rows else math.nan


def as_markdown(rows: Sequence[CellResult], failed: Sequence[Outcome], logs: Mapping[str, Path]) -> str:
    """The table, best first, and what failed."""
    seeds = any(len(row.outcomes) > 1 for row in rows)
    names = ["", *_columns(rows, seeds)]
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    lines += [f"| {' | '.join([_title(row), *_cells(row, rows, seeds).values()])} |" for row in rows]
    return "\n".join([*lines, *_failures(failed, logs)])


def as_list(rows: Sequence[CellResult], failed: Sequence[Outcome], logs: Mapping[str, Path], width: int) -> str:
    """The same for a narrow terminal: a label, and the figures below it in lines of at most `width` characters."""
    seeds, lines = any(len(row.outcomes) > 1 for row in rows), []
    for number, row in enumerate(rows, 1):
        figures = "; ".join(f"{name} {cell}" for name, cell in _cells(row, rows, seeds).items() if cell != "–")
        lines += textwrap.wrap(f"{number}. {_title(row)}", width, subsequent_indent="   ")
        lines += textwrap.wrap(figures, width, initial_indent="   ", subsequent_indent="   ")
    return "\n".join([*lines, *_failures(failed, logs)])


def as_json(rows: Sequence[CellResult], failed: Sequence[Outcome]) -> dict[str, Any]:
    """Returns the same as plain types; unknown values are None."""
    return {"rows": [_row(row, rows) for row in rows], "failed": [_failure(outcome) for outcome in failed]}


def _row(row: CellResult, rows: Sequence[CellResult]) -> dict[str, Any]:
    names = ("held_out", "loss", "mean_loss", "step_seconds", "cpu_seconds", "peak_memory")
    figures = {name: row.mean(name) for name in names}
    figures |= {"difference": row.score - best_of(rows), "held_out_std": row.spread("held_out")}
    return {
        "label": row.cell.label,
        "job": str(row.cell.job),
        "settings": dict(row.cell.settings),
        "runs": [str(outcome.folder) for outcome in row.outcomes],
        "ended": row.ended,
        "ordered_by": row.by,
        "steps": row.outcomes[0].step,
        "tokens": row.outcomes[0].fed,
        **{name: _plain(value) for name, value in figures.items()},
    }


def _failure(outcome: Outcome) -> dict[str, Any]:
    return {"label": outcome.trial.cell.label, "run": str(outcome.folder), "ended": outcome.ended}


def _plain(value: float) -> float | str | None:
    if math.isnan(value):
        return None  # JSON has no NaN
    return value if math.isfinite(value) else str(value)


def _title(row: CellResult) -> str:
    return f"{row.cell.label} ({row.ended})" if row.ended else row.cell.label


def _columns(rows: Sequence[CellResult], seeds: bool) -> list[str]:
    return list(_cells(rows[0], rows, seeds)) if rows else []


def _cells(row: CellResult, rows: Sequence[CellResult], seeds: bool) -> dict[str, str]:
    """Figures of a row by the names of their columns."""
    evaluated = any(outcome.evaluations for each in rows for outcome in each.outcomes)
    difference = row.score - best_of(rows)
    memory = row.mean("peak_memory")
    return {
        **({"seeds": str(len(row.outcomes))} if seeds else {}),
        **({"held-out loss": _figure(row, "held_out")} if evaluated else {}),
        "difference": "best" if row is rows[0] else "–" if math.isnan(difference) else f"{difference:+.4f}",
        "training loss": _figure(row, "loss"),
        MEAN_NAME: _figure(row, "mean_loss"),
        "steps": f"{row.outcomes[0].step:,}",
        "tokens": f"{row.outcomes[0].fed:,.0f}",
        "s/step": _short(row.mean("step_seconds")),
        "CPU s": _short(row.mean("cpu_seconds")),
        "memory": "–" if math.isnan(memory) else f"{memory / 1e6:,.0f} MB",
    }


def _short(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def _figure(row: CellResult, name: str) -> str:
    mean, spread = row.mean(name), row.spread(name)
    return "–" if math.isnan(mean) else f"{mean:.4f}" + ("" if math.isnan(spread) else f" ± {spread:.4f}")


def _failures(failed: Sequence[Outcome], logs: Mapping[str, Path]) -> list[str]:
    return [f"\n{o.trial.name} failed: {o.ended}; see {logs[o.trial.name]}" for o in failed]
