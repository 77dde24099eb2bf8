"""The section `data`: the mixture of sources, and the loss of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from attrs import frozen

from forge_core.config.mixture import weights_over_time
from forge_core.data.order import whole_shares
from forge_kit.tools.report_sections import Bars, Block, Cell, ReportRun, ReportSection, Table
from forge_plugin_runs.final_loss import MEAN_NAME, mean_of_last

COLORS = ("#4e79a7", "#9c755f", "#76b7b2", "#edc948", "#b07aa1", "#59a14f", "#ff9da7", "#8d949b")
"""Colours that differ from the colours of runs."""


@frozen(kw_only=True)
class Data(ReportSection):
    """Sources of the training data with their shares, before and in each phase, and their training losses."""

    title: ClassVar[str] = "Data"
    place: ClassVar[float] = 40.0

    def blocks(self, runs: Sequence[ReportRun]) -> Iterable[Block]:
        """Bars with the shares of the sources if there are several, and a table with their losses."""
        mixed = [run for run in runs if _sources(run)]
        if not mixed:
            return
        names = list(dict.fromkeys(name for run in mixed for name in _sources(run)))
        if len(names) > 1:
            bars = [
                (label if several else run, [shares.get(name, 0.0) for name in names])
                for run in mixed
                for phases in [phase_shares(run.job)]
                for several in [len(phases) > 1]
                for label, shares in ((f"{run.name}, {phase}", shares) for phase, shares in phases)
            ]
            colors = {name: COLORS[number % len(COLORS)] for number, name in enumerate(names)}
            yield Bars(title="Mixture", parts=colors, rows=bars)
        head = ["source", "run", "type", "share", MEAN_NAME]
        yield Table(head=head, rows=[row for run in mixed for row in _rows(run)])


def _sources(run: ReportRun) -> Mapping[str, Mapping[str, Any]]:
    sources = run.job.get("data", {}).get("sources", [])
    return {str(source.get("name") or number): source for number, source in enumerate(sources)}


def phase_shares(job: Mapping[str, Any]) -> list[tuple[str, dict[str, float]]]:
    """Returns the share of each source, from the beginning and from the start of each phase on, with a label."""
    data = job.get("data", {})
    sources = {str(s.get("name") or n): s for n, s in enumerate(data.get("sources", []))}
    first, phases = {name: float(source.get("weight", 1.0)) for name, source in sources.items()}, data.get("phases", [])
    weights = weights_over_time(first, (phase.get("weights", {}) for phase in phases))
    labels = ["from step 0", *map(_begin, phases)]
    return [
        (label, _shares(now, float(data.get("temperature", 1.0)))) for label, now in zip(labels, weights, strict=True)
    ]


def _begin(phase: Mapping[str, Any]) -> str:
    step = phase.get("start_step")
    return f"from token {phase.get('start_tokens', 0):,}" if step is None else f"from step {step:,}"


def _shares(weights: Mapping[str, float], temperature: float) -> dict[str, float]:
    parts = whole_shares(list(weights.values()), temperature)
    return {name: part / (sum(parts) or 1) for name, part in zip(weights, parts, strict=True)}


def _rows(run: ReportRun) -> Iterable[Sequence[Cell]]:
    shares = phase_shares(run.job)[0][1]
    for name, source in _sources(run).items():
        losses = run.metrics.column(f"loss/source/{name}")[1].tolist()
        # A mean: the last step has few tokens of a small source, or none
        loss = mean_of_last(losses) if losses else None
        yield [name, run, str(source.get("type", "")).rpartition("/")[2], f"{100 * shares[name]:.1f} %", loss]
