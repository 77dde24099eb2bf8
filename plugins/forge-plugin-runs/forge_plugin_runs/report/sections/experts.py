"""The section `experts`: maps of counts, such as tokens by layer and expert."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from attrs import frozen

from forge_kit.tools.report_sections import Block, Cell, HeatMap, ReportRun, ReportSection, Table

LINES = 50
"""Lines with counts whose mean is shown: the last ones."""
Counts = Mapping[str, list[float]]
"""Means by row (layer)."""


@frozen(kw_only=True)
class Experts(ReportSection):
    """Counts of the lines of metrics as maps: how many tokens each expert of each layer had at the end."""

    title: ClassVar[str] = "Experts and other counts"
    place: ClassVar[float] = 50.0

    def blocks(self, runs: Sequence[ReportRun]) -> Iterable[Block]:
        """A map for each run and count, and the balance of counts without negative numbers."""
        found = [(run, name, rows) for run in runs for name, rows in _merged(mean_counts(run)).items()]
        for run, name, rows in found:
            yield _map(run, name, rows)
        balance = [row for run, name, rows in found if not _is_signed(rows) for row in _balance(run, name, rows)]
        if balance:
            head = ["counts", "run", "layer", "fullest, of the mean", "emptiest, of the mean", "without any"]
            yield Table(title="Balance", head=head, rows=balance, folded=len(balance) > 16)


def mean_counts(run: ReportRun) -> Mapping[str, Counts]:
    """Returns the mean counts of the last lines that have any, by name and row."""
    lines = [row["counts"] for row in run.metrics.last_with("counts", LINES)]
    means: dict[str, dict[str, list[float]]] = {}
    for name, rows in (lines[-1] if lines else {}).items():
        for row, last in rows.items():
            # Rows of another length, or none, cannot be part of the mean
            values = [line[name][row] for line in lines if len(line.get(name, {}).get(row, ())) == len(last)]
            means.setdefault(name, {})[row] = [
                sum(map(float, each)) / len(values) for each in zip(*values, strict=True)
            ]
    return means


def _merged(counts: Mapping[str, Counts]) -> Mapping[str, Counts]:
    """Counts with the same numbers share a map: without a capacity, load and choices are one."""
    maps: list[tuple[list[str], Counts]] = []
    for name, rows in counts.items():
        same = next((names for names, shown in maps if shown == rows), None)
        if same is None:
            maps.append(([name], rows))
        else:
            same.append(name)
    return {", ".join(names): rows for names, rows in maps}


def _is_signed(rows: Counts) -> bool:
    return any(value < 0 for values in rows.values() for value in values)


def _map(run: ReportRun, name: str, rows: Counts) -> HeatMap:
    """Counts relative to the mean of their row; signed numbers unchanged."""
    title = f"{run.name}: {name}"
    if _is_signed(rows):
        reach = max(abs(value) for values in rows.values() for value in values)
        return HeatMap(title=title, values=list(rows.values()), rows=list(rows), reach=reach)
    # Layers may have counted nothing, and their mean is then 0
    shares = [[value / (_mean(values) or 1.0) for value in values] for values in rows.values()]
    return HeatMap(title=f"{title}, of the layer's mean", values=shares, rows=list(rows), middle=1.0)


def _balance(run: ReportRun, name: str, rows: Counts) -> Iterable[list[Cell]]:
    for row, values in rows.items():
        mean = _mean(values)
        if mean > 0 and math.isfinite(mean):
            yield [name, run, row, max(values) / mean, min(values) / mean, sum(value == 0 for value in values)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
