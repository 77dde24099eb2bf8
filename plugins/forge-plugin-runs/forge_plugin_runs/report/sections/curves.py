"""The section `curves`: every logged number over steps, tokens or time."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from typing import ClassVar

import numpy as np
from attrs import evolve, frozen

from forge_core.contracts.errors import JobError, did_you_mean
from forge_kit.tools.metrics import Metrics
from forge_kit.tools.report_sections import Block, Chart, Line, Paragraph, ReportRun, ReportSection

TITLES = {
    "loss": "Training loss",
    "eval/loss": "Held-out loss",
    "eval/bits_per_byte": "Held-out bits per byte",
    "eval/perplexity": "Held-out perplexity",
    "grad_norm": "Gradient norm, before clipping",
    "lr": "Learning rate",
    "tokens_per_second": "Tokens per second",
    "step_seconds": "Seconds per step",
    "mfu": "Model FLOPs utilisation",
    "data_wait": "Share of the step waiting for data",
}
MAIN = ("loss", "eval/*", "loss/source/*", "grad_norm", "lr", "tokens_per_second", "mfu", "*memory*", "data_wait")
"""Numbers that come first, and alone where there are many."""
AXES = ("step", "tokens", "time", "skipped", "counts")
"""What a line has that is no curve."""
FEW = 24
"""Curves up to which all are drawn."""
SHARES = ("data_wait", "mfu", "goodput")
"""Numbers between 0 and 1, of which a logarithm would show noise near 0."""


@frozen(kw_only=True)
class Curves(ReportSection):
    """Loss, held-out metrics, gradient norm, learning rate, speed, memory and other logged numbers, of all runs."""

    title: ClassVar[str] = "Curves"
    place: ClassVar[float] = 10.0

    names: tuple[str, ...] = ()
    """Globs of the numbers to draw (`moe/*`). Empty: all where there are at most 24, else the main ones."""

    def blocks(self, runs: Sequence[ReportRun]) -> Iterable[Block]:
        """A chart for each number with a line for each run, and the names of numbers that are left out."""
        logged = logged_names(runs)
        if not logged:
            return
        shown = self._chosen(logged)
        for name in shown:
            lines = [line for run in runs if (line := _line(run, name))]
            chart = Chart(title=TITLES.get(name, name), name=name, lines=lines)
            yield evolve(chart, axis="linear") if name in SHARES else chart
        if left_out := [name for name in logged if name not in shown]:
            yield Paragraph(text=f"Also logged, and drawn with --curves: {', '.join(left_out)}")

    def _chosen(self, logged: Sequence[str]) -> list[str]:
        main = _matching(MAIN, logged)
        if self.names:
            return _matching(self.names, logged)
        return [*main, *(name for name in logged if name not in main)] if len(logged) <= FEW else main


def check_names(patterns: Iterable[str], runs: Sequence[ReportRun]) -> None:
    """Raise a `JobError` for a pattern that matches nothing which the runs have logged."""
    logged = logged_names(runs)
    for pattern in patterns:
        if not fnmatch.filter(logged, pattern):
            near = did_you_mean(pattern, logged)
            raise JobError(f"--curves {pattern}: no run has logged it{near}; there are {', '.join(logged)}")


def logged_names(runs: Sequence[ReportRun]) -> list[str]:
    """Returns the numbers that the runs have logged, in the order of their first lines."""
    names = dict.fromkeys(name for run in runs for table in _tables(run) for name in table.numbers())
    return [name for name in names if name not in AXES and not name.endswith("/tokens")]


def _matching(patterns: Iterable[str], names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(name for pattern in patterns for name in fnmatch.filter(names, pattern)))


def _line(run: ReportRun, name: str) -> Line | None:
    points = [table.column(name) for table in _tables(run)]
    x, y = np.concatenate([steps for steps, _ in points]), np.concatenate([values for _, values in points])
    # A number may be in lines of steps and of evaluations
    order = np.lexsort((y, x))
    return Line(run=run, x=x[order], y=y[order]) if len(order) else None


def _tables(run: ReportRun) -> tuple[Metrics, Metrics]:
    return run.metrics, run.metrics.evaluations
