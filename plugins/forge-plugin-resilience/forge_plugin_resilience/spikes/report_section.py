"""The section `spikes` of `forge-run report`: the steps that spiked, and the documents of which they were made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from attrs import frozen

from forge_core.config.load import parse_job
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.report_sections import Block, Cell, Paragraph, ReportRun, ReportSection, Table

if TYPE_CHECKING:
    from forge_kit.data.job_data import JobData, Passage

SCORE = "spikes/z/{}"
WATCHED = ("loss", "grad_norm")
SHOWN = 20
"""Spikes of a run that are listed at most, the largest ones."""
EXAMINED = 5
"""Of these, the largest ones whose documents are listed."""
DOCUMENTS = 40
"""Documents of a step that are listed at most."""
NEEDED = ("data", "model", "plugins")
"""Tables of a job whose components must be installed to find the documents of a step."""


@frozen(kw_only=True)
class SpikesSection(ReportSection):
    """Spikes of loss and gradient norm that the hook `spikes` found, and the documents of the largest ones."""

    title: ClassVar[str] = "Spikes"
    place: ClassVar[float] = 56.0

    def blocks(self, runs: Sequence[ReportRun]) -> Iterable[Block]:
        """Yields a table of the spikes of each run, and one of documents for each of the largest."""
        for run in runs:
            scores = spikes_of(run)
            if not scores:
                continue
            largest = sorted(scores, key=lambda step: -scores[step])[:SHOWN]
            count = f"{len(scores)} spikes" if len(scores) > 1 else "a spike"
            only = f", of which the {SHOWN} largest are shown" if len(scores) > SHOWN else ""
            head: list[Cell] = ["step", "loss", "gradient norm", "z of loss", "z of gradient norm", "update"]
            rows = [_row(run, step) for step in sorted(largest)]
            yield Table(title=f"{run.name}: {count}{only}", head=head, rows=rows)
            yield from _document_tables(run, sorted(largest[:EXAMINED]))


def spikes_of(run: ReportRun) -> dict[int, float]:
    """Returns the largest z-score of each step of a run that spiked, by the threshold of its hook."""
    hooks = run.job.get("hooks", {}).values()
    thresholds = [hook["threshold"] for hook in hooks if str(hook.get("type")).rpartition("/")[2] == "spikes"]
    scores: dict[int, float] = {}
    for name in WATCHED if thresholds else ():
        steps, values = run.metrics.column(SCORE.format(name))
        # Not finite values have an infinite score
        for index in np.flatnonzero(np.asarray(values) > min(thresholds)):
            step = int(steps[index])
            scores[step] = max(scores.get(step, 0.0), float(values[index]))
    return scores


def _row(run: ReportRun, step: int) -> list[Cell]:
    names = (*WATCHED, *(SCORE.format(name) for name in WATCHED))
    skipped = _at(run, "skipped", step)
    return [str(step), *(_at(run, name, step) for name in names), "skipped" if skipped else "made"]


def _at(run: ReportRun, name: str, step: int) -> float | None:
    """The value of a step; None if it has none."""
    steps, values = run.metrics.column(name)
    index = int(np.searchsorted(steps, step))
    return float(values[index]) if index < len(steps) and steps[index] == step else None


def _document_tables(run: ReportRun, steps: Sequence[int]) -> Iterator[Block]:
    try:
        data = _data_of(run)
        listed = {step: list(data.passages_of(step)) for step in steps}
    # The data are built by code of any plugin, and may not be on this machine; the spikes are of use without them
    except Exception as error:
        yield Paragraph(text=f"Documents of these steps are not known here: {error}")
        return
    for step, samples in listed.items():
        rows = [row for number, passages in samples for row in _rows(number, passages)]
        if not rows:
            yield Paragraph(text=f"It is not known of which documents the samples of step {step} were made.")
            continue
        more = f"; {DOCUMENTS} of {len(rows)}, all by --documents" if len(rows) > DOCUMENTS else ""
        title = f"{run.name}: documents of step {step} (forge-run data {run.folder}/job.toml --step {step}{more})"
        head: list[Cell] = ["sample", "position", "tokens", "file", "line", "id"]
        yield Table(title=title, head=head, rows=rows[:DOCUMENTS], folded=True)


def _data_of(run: ReportRun) -> JobData:
    # Late: it imports torch, which reports without spikes need not wait for
    from forge_kit.data.job_data import open_data

    catalog = Catalog.installed()
    # As the run has kept it, without its loggers and hooks, which need not be installed here
    job = parse_job(run.text("job.toml"), f"{run.folder}/job.toml", catalog, NEEDED)
    return open_data(job, catalog)


def _rows(number: int, passages: Sequence[Passage]) -> Iterator[list[Cell]]:
    """Yields a row for each document of a sample. Numbers of lines are texts, which no table shortens."""
    for passage in passages:
        origin = passage.origin
        known: Mapping[str, Any] = origin.fields if origin else {}
        place: list[Cell] = [origin.file, "" if origin.line is None else str(origin.line)] if origin else ["", ""]
        yield [str(number), str(passage.position), str(passage.tokens), *place, str(known.get("id", ""))]
