"""The section `checkpoints`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import ClassVar

from attrs import frozen

from forge_kit.tools.report_sections import Block, Cell, ReportRun, ReportSection, Table, finite
from forge_plugin_runs.facts import manifest_of, read_run

SHOWN = 20
"""Checkpoints of a run that are listed: the newest."""


@frozen(kw_only=True)
class Checkpoints(ReportSection):
    """The checkpoints of each run: step, time, tokens, and the evaluation of that step."""

    title: ClassVar[str] = "Checkpoints"
    place: ClassVar[float] = 60.0

    def blocks(self, runs: Sequence[ReportRun]) -> Iterable[Block]:
        """A table with the newest checkpoints of each run, folded if it is long."""
        rows = [row for run in runs for row in _rows(run)]
        if rows:
            head: list[Cell] = ["run", "step", "saved (UTC)", "tokens", "held-out loss"]
            yield Table(head=head, rows=rows, folded=len(rows) > SHOWN)


def _rows(run: ReportRun) -> Iterable[Sequence[Cell]]:
    for step in read_run(run.folder).checkpoints[-SHOWN:]:
        manifest = manifest_of(run.folder, step)
        evaluation = manifest.get("evaluation") or {}
        # A manifest has the last evaluation, which may be of an earlier step
        metrics = evaluation.get("metrics", {}) if evaluation.get("step") == step else {}
        saved = manifest.get("time")
        when = datetime.fromtimestamp(saved, UTC).strftime("%Y-%m-%d %H:%M:%S") if saved else "cannot be read"
        yield [run, f"{step:,}", when, finite(manifest.get("tokens")), finite(metrics.get("eval/loss"))]
