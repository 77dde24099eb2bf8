"""The section `samples`: texts that the models wrote."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from attrs import frozen

from forge_kit.tools.report_sections import Block, Preformatted, ReportRun, ReportSection
from forge_kit.tools.sampled_texts import last_samples

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
        """The newest samples of each run open, the ones before folded; cut where they are very long."""
        for run in runs:
            for age, sampled in enumerate(last_samples(run.folder, SHOWN)):
                text = sampled.for_people()
                # The page has all texts inside, and a model may write without an end
                cut = text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
                yield Preformatted(title=f"{run.name}, step {sampled.step:,}", text=cut.strip("\n"), folded=age > 0)
