"""The section `activations` of `forge-run report`: what the sink `statistics` has written."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, ClassVar

from attrs import frozen

from forge_kit.tools.report_sections import Block, Cell, HeatMap, ReportRun, ReportSection, Table, finite
from forge_plugin_taps.statistics import SCALARS

FILE = "taps/statistics.jsonl"
SHOWN = 120
"""Sampled steps that a map has: more are thinned out evenly."""
ROWS = 24
"""Points from which the table is folded."""


@frozen(kw_only=True)
class Activations(ReportSection):
    """Statistics of activations by point: norm and kurtosis over the sampled steps, histograms and figures at the end.

    From `taps/statistics.jsonl`, by the sink `statistics`.
    """

    title: ClassVar[str] = "Activations"
    place: ClassVar[float] = 55.0

    def blocks(self, runs: Sequence[ReportRun]) -> Iterable[Block]:
        """Returns the maps of all runs first, then their tables; runs without the file have none."""
        for run in runs:
            lines = [line for line in run.lines(FILE) if line.get("points")]
            if lines:
                # Evenly and with both ends, so that the newest line is shown
                kept = [lines[(len(lines) - 1) * n // max(1, SHOWN - 1)] for n in range(SHOWN)]
                yield from _maps(run, lines if len(lines) <= SHOWN else kept)
        for run in runs:
            if lines := [line for line in run.lines(FILE) if line.get("points")]:
                yield _table(run, lines[-1]["points"])


def _maps(run: ReportRun, lines: Sequence[Mapping[str, Any]]) -> Iterable[Block]:
    names, span = list(lines[-1]["points"]), f"step {lines[0]['step']:,} to {lines[-1]['step']:,}"
    yield HeatMap(
        title=f"{run.name}: norm, doublings beyond the point's median, {span}",
        values=[_doublings(_series(lines, name, "norm")) for name in names],
        rows=names,
        row="point",
        column="sampled step",
    )
    yield HeatMap(
        title=f"{run.name}: kurtosis, doublings beyond a normal distribution's 3, {span}",
        values=[[_log2(value / 3) for value in _series(lines, name, "kurtosis")] for name in names],
        rows=names,
        row="point",
        column="sampled step",
        reach=3.0,
    )
    shares = [_shares(lines[-1]["points"][name].get("histogram", [])) for name in names]
    yield HeatMap(
        title=f"{run.name}: share of values by bin, at step {lines[-1]['step']:,}",
        values=shares,
        rows=names,
        row="point",
        column="bin",
        reach=max((share for row in shares for share in row), default=1.0),
    )


def _series(lines: Sequence[Mapping[str, Any]], name: str, scalar: str) -> list[float]:
    values = (finite(line["points"].get(name, {}).get(scalar)) for line in lines)
    return [math.nan if value is None else value for value in values]


def _doublings(values: Sequence[float]) -> list[float]:
    middle = median([value for value in values if value > 0] or [1.0])
    return [_log2(value / middle) for value in values]


def _log2(value: float) -> float:
    return math.log2(value) if value > 0 else math.nan


def _shares(histogram: Sequence[float]) -> list[float]:
    total = sum(histogram) or 1.0
    return [count / total for count in histogram]


def _table(run: ReportRun, points: Mapping[str, Mapping[str, Any]]) -> Table:
    rows: list[list[Cell]] = [
        [name, *(finite(figures.get(scalar)) for scalar in SCALARS)] for name, figures in points.items()
    ]
    title = f"{run.name}: figures at the last sampled step"
    head = ["point", *(scalar.replace("_", " ") for scalar in SCALARS)]
    return Table(title=title, head=head, rows=rows, folded=len(rows) > ROWS)
