"""The section `training_stats` of `forge-run report`: what the hook has logged, and which limits were left."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, ClassVar

from attrs import frozen

from forge_kit.tools.report_sections import Block, Cell, Chart, HeatMap, Line, ReportRun, ReportSection, Table, finite
from forge_plugin_taps.stats.limits import Limit
from forge_plugin_taps.stats.noise_scale import NOISE
from forge_plugin_taps.stats.training_stats import GRADIENT, LARGEST_LOGIT, PHASES, PREFIX, RATIO, UPDATE, WEIGHT, WHOLE

SHOWN = 120
"""Sampled steps that a map has: more are thinned out evenly."""
ROWS = 24
"""Groups from which the table is folded."""
USUAL = -3.0
"""Logarithm of the ratio of update to weight that is often given for Adam: 1e-3."""

CHARTS = {"Gradient noise scale, tokens": NOISE, "Largest logit": LARGEST_LOGIT}

Row = Mapping[str, Any]


@frozen(kw_only=True)
class TrainingStatsSection(ReportSection):
    """Ratios of updates to weights, and growth of weights and gradients, by layer and role; limits that were left.

    From the lines of metrics, by the hook `training_stats`; the noise scale by the plugin `noise_scale`.
    """

    title: ClassVar[str] = "What training does"
    place: ClassVar[float] = 54.0

    def blocks(self, runs: Sequence[ReportRun]) -> Iterable[Block]:
        """Yields curves and memory of all runs, then maps, last figures and what was beyond a limit, run by run."""
        for title, name in CHARTS.items():
            if lines := [line for run in runs if (line := _line(run, name))]:
                yield Chart(title=title, name=name, lines=lines)
        if peaks := list(_peaks(runs)):
            yield Table(title="Peak of memory by the end of each phase, GB", head=["run", *PHASES], rows=peaks)
        for run in runs:
            rows = [row for row in run.metrics if f"{WEIGHT}/{WHOLE}" in row]
            if rows:
                # Evenly and with both ends, so that the newest step is shown
                kept = [rows[(len(rows) - 1) * n // (SHOWN - 1)] for n in range(SHOWN)]
                yield from _maps(run, rows if len(rows) <= SHOWN else kept)
                yield _table(run, rows[-1])
            if broken := list(_broken(run)):
                yield Table(
                    title=f"{run.name}: beyond a limit", head=["number", "limit", "steps", "first", "last"], rows=broken
                )


def _peaks(runs: Iterable[ReportRun]) -> Iterable[list[Cell]]:
    """Yields the largest peak of all sampled steps by phase, of runs that have any."""
    for run in runs:
        values = [[finite(row.get(f"{PREFIX}/memory/{phase}_gb")) or 0.0 for phase in PHASES] for row in run.metrics]
        largest = [max(of_phase) for of_phase in zip(*values, strict=True)]
        if any(largest):
            yield [run, *largest]


def _line(run: ReportRun, name: str) -> Line | None:
    # NaN, as where the estimate of a square is not positive, is a gap in the curve
    rows = [(row["step"], value) for row in run.metrics if (value := finite(row.get(name))) is not None]
    return Line(run=run, x=[step for step, _ in rows], y=[value for _, value in rows]) if rows else None


def _groups(row: Row, kind: str) -> list[str]:
    return [name.removeprefix(f"{kind}/") for name in row if name.startswith(f"{kind}/")]


def _maps(run: ReportRun, rows: Sequence[Row]) -> Iterable[Block]:
    span = f"step {rows[0]['step']:,} to {rows[-1]['step']:,}"
    if groups := _groups(rows[-1], RATIO):
        yield _map(
            f"{run.name}: update over weight, decades beyond 1e-3, {span}",
            {group: [_log(value, 10) - USUAL for value in _series(rows, f"{RATIO}/{group}")] for group in groups},
        )
    groups = _groups(rows[-1], WEIGHT)
    yield _map(
        f"{run.name}: weight norm, doublings since the first sample, {span}",
        {group: _doublings(_series(rows, f"{WEIGHT}/{group}"), first=True) for group in groups},
    )
    yield _map(
        f"{run.name}: gradient norm, doublings beyond the group's median, {span}",
        {group: _doublings(_series(rows, f"{GRADIENT}/{group}")) for group in groups},
    )


def _map(title: str, values: Mapping[str, Sequence[float]]) -> HeatMap:
    return HeatMap(title=title, values=list(values.values()), rows=list(values), row="group", column="sampled step")


def _series(rows: Iterable[Row], name: str) -> list[float]:
    values = (finite(row.get(name)) for row in rows)
    return [math.nan if value is None else value for value in values]


def _doublings(values: Sequence[float], *, first: bool = False) -> list[float]:
    positive = [value for value in values if value > 0] or [1.0]
    base = positive[0] if first else median(positive)
    return [_log(value / base, 2) for value in values]


def _log(value: float, base: float) -> float:
    return math.log(value, base) if value > 0 else math.nan


def _table(run: ReportRun, row: Row) -> Table:
    kinds = [kind for kind in (WEIGHT, GRADIENT, UPDATE, RATIO) if _groups(row, kind)]
    groups = _groups(row, WEIGHT)
    rows: list[list[Cell]] = [[group, *(finite(row.get(f"{kind}/{group}")) for kind in kinds)] for group in groups]
    head = ["group", *(kind.removeprefix(f"{PREFIX}/").replace("_", " ") for kind in kinds)]
    return Table(title=f"{run.name}: at step {row['step']:,}", head=head, rows=rows, folded=len(rows) > ROWS)


def _broken(run: ReportRun) -> Iterable[list[Cell]]:
    """Yields numbers that were beyond a limit of the job: name, bound, number of steps, first and last of them."""
    hooks = [hook for hook in run.job.get("hooks", {}).values() if hook.get("type", "").endswith("/training_stats")]
    for hook in hooks:
        # The hook judges sampled steps alone, also numbers that are in every line
        rows = [row for row in run.metrics if row["step"] % hook["interval"] == 0]
        for table in hook["limits"]:
            limit = Limit(**table)
            steps: dict[str, list[int]] = {}
            for row in rows:
                for name in _beyond(limit, row):
                    steps.setdefault(name, []).append(row["step"])
            for name, each in steps.items():
                yield [name, limit.bounds(), len(each), each[0], each[-1]]


def _beyond(limit: Limit, row: Row) -> Iterable[str]:
    # Lines have numbers that are not finite as text; the counts of modules are no number
    numbers = ((name, value) for name, value in row.items() if isinstance(value, int | float | str))
    return [name for name, value in numbers if limit.matches(name) and limit.words(float(value))]
