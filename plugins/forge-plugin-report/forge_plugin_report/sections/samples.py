"""The section `samples`: texts that the models wrote."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import ClassVar

from attrs import frozen

from forge_kit.report_sections import Block, Preformatted, ReportRun, ReportSection

FILE = "samples.txt"
STEP = re.compile(r"^=== step (\d+) ===\n", re.MULTILINE)
SHOWN = 3
"""Steps of a run whose samples are shown: the last ones."""
LONGEST = 20_000
"""Characters of the samples of a step."""


@frozen(kw_only=True)
class SamplesSection(ReportSection):
    """Texts of `[hooks.samples]`, the newest first."""

    title: ClassVar[str] = "Samples"
    place: ClassVar[float] = 80.0

    def blocks(self, runs: Sequence[ReportRun]) -> Iterable[Block]:
        for run in runs:
            _, *parts = STEP.split(run.text(FILE))
            steps = list(zip(parts[::2], parts[1::2], strict=True))[-SHOWN:]
            for age, (step, text) in enumerate(reversed(steps)):
                cut = text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
                yield Preformatted(title=f"{run.name}, step {int(step):,}", text=cut.strip("\n"), folded=age > 0)
