"""Results of the runs of a comparison."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from attrs import frozen

from forge_plugin_curves.compare.grid import Cell, Trial
from forge_plugin_curves.history import read_lines

LAST = 0.05
"""Share of a run over whose last steps the training loss is averaged."""


@frozen(kw_only=True)
class Outcome:
    """One run."""

    trial: Trial
    failure: str
    """Why it did not finish; empty if it did."""
    tokens: Sequence[float]
    """Positions fed, at each step that has a line of metrics."""
    losses: Sequence[float]
    """Training loss of these steps."""
    evaluations: Sequence[float]
    """Held-out losses, in order; none if the job does not evaluate."""
    seconds: float
    """Total over all steps."""

    @property
    def loss(self) -> float:
        """Training loss, over the last steps."""
        count = max(1, round(LAST * len(self.losses)))
        return statistics.fmean(self.losses[-count:]) if self.losses else math.nan

    @property
    def held_out(self) -> float:
        """Held-out loss at the end; NaN if there is none."""
        return self.evaluations[-1] if self.evaluations else math.nan


def read_outcome(trial: Trial, folder: Path, failure: str) -> Outcome:
    """Read the results of a run from its folder."""
    lines = list(read_lines(folder / "metrics.jsonl", last_step=1 << 62))
    steps = [line for line in lines if "loss" in line]
    return Outcome(
        trial=trial,
        failure=failure,
        tokens=[float(line["tokens"]) for line in steps],
        losses=[float(line["loss"]) for line in steps],
        evaluations=[float(line["eval/loss"]) for line in lines if "eval/loss" in line],
        seconds=sum(float(line["step_seconds"]) for line in steps),
    )


@frozen(kw_only=True)
class CellResult:
    """A row of the comparison: all finished runs of a cell."""

    cell: Cell
    outcomes: Sequence[Outcome]

    @property
    def score(self) -> float:
        """By which rows are ordered: mean held-out loss, or training loss where some job has no evaluation."""
        return self.mean("held_out") if self.outcomes[0].evaluations else self.mean("loss")

    def mean(self, name: str) -> float:
        """Over the seeds."""
        return statistics.fmean(getattr(outcome, name) for outcome in self.outcomes)

    def spread(self, name: str) -> float:
        """Standard deviation over the seeds; NaN of one."""
        values = [getattr(outcome, name) for outcome in self.outcomes]
        return statistics.stdev(values) if len(values) > 1 else math.nan


def rows_of(outcomes: Sequence[Outcome]) -> list[CellResult]:
    """Best first. Losses that are not finite come last."""
    cells: dict[int, list[Outcome]] = {}
    for outcome in outcomes:
        if not outcome.failure:
            cells.setdefault(id(outcome.trial.cell), []).append(outcome)
    rows = [CellResult(cell=own[0].trial.cell, outcomes=own) for own in cells.values()]
    return sorted(rows, key=lambda row: (not math.isfinite(row.score), row.score))


def as_markdown(rows: Sequence[CellResult], failed: Sequence[Outcome], logs: Mapping[str, Path]) -> str:
    """The table, best first, and what failed."""
    held_out = any(outcome.evaluations for row in rows for outcome in row.outcomes)
    seeds = any(len(row.outcomes) > 1 for row in rows)
    names = ["", *["seeds"] * seeds, *["held-out loss"] * held_out, "training loss", "tokens", "s"]
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    for row in rows:
        first = row.outcomes[0]
        cells = [row.cell.label, *([str(len(row.outcomes))] if seeds else [])]
        cells += [_figure(row, "held_out")] if held_out else []
        cells += [_figure(row, "loss"), f"{first.tokens[-1] if first.tokens else 0:,.0f}", f"{row.mean('seconds'):.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [f"\n{o.trial.name} failed: {o.failure}; see {logs[o.trial.name]}" for o in failed]
    return "\n".join(lines)


def _figure(row: CellResult, name: str) -> str:
    mean, spread = row.mean(name), row.spread(name)
    return "–" if math.isnan(mean) else f"{mean:.4f}" + ("" if math.isnan(spread) else f" ± {spread:.4f}")
