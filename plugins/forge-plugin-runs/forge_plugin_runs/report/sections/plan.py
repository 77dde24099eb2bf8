"""The section `plan`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from attrs import frozen

from forge_kit.tools.report_sections import Block, Preformatted, ReportRun, ReportSection


@frozen(kw_only=True)
class Plan(ReportSection):
    """What each run printed before its first step: plugins, device, parameters, stages, memory."""

    title: ClassVar[str] = "Plan"
    place: ClassVar[float] = 30.0

    def blocks(self, runs: Sequence[ReportRun]) -> Iterable[Block]:
        """The plan of each run that has one, folded."""
        for run in runs:
            if text := run.plan().rstrip():
                yield Preformatted(title=f"Plan of {run.name}", text=text, folded=True)
