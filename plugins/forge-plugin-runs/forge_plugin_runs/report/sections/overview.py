"""The section `overview`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, ClassVar

from attrs import frozen

from forge_kit.tools.report_sections import Block, Cell, ReportRun, ReportSection, Table
from forge_plugin_runs.facts import RunFacts, read_run
from forge_plugin_runs.final_loss import final_loss, last_values, mean_of_last
from forge_plugin_runs.words import count_text, size_text

MANY = 4
"""Number of runs from which each is a row and not a column."""
BETTER_IS_MORE = ("accuracy", "acc", "exact_match")


@frozen(kw_only=True)
class Overview(ReportSection):
    """What each run is and where it stands: state, steps, tokens, losses, speed, model, optimizer, machine."""

    title: ClassVar[str] = "Overview"
    place: ClassVar[float] = 0.0

    def blocks(self, runs: Sequence[ReportRun]) -> Iterable[Block]:
        """A table with a column for each run, or with a row for each from four runs on."""
        facts = [facts_of(run, read_run(run.folder)) for run in runs]
        names = [name for name in dict.fromkeys(name for each in facts for name in each) if name]
        columns = [[each.get(name) for name in names] for each in facts]
        if len(runs) >= MANY:
            yield Table(head=["run", *names], rows=[[run, *cells] for run, cells in zip(runs, columns, strict=True)])
        else:
            rows = [[name, *(cells[n] for cells in columns)] for n, name in enumerate(names)]
            yield Table(head=["", *runs], rows=rows)


def facts_of(run: ReportRun, state: RunFacts) -> dict[str, Cell]:
    """Returns the figures of a run by name; what its folder does not have is left out."""
    reason = state.end.reason if state.end else state.ended
    facts: dict[str, Cell] = {"state": f"{state.state}{f': {reason}' if reason else ''}"}
    facts["steps"] = f"{state.step:,}" + (f" of {state.steps:,}" if state.steps else "")
    facts |= {"tokens": count_text(state.tokens)} if state.tokens else {}
    facts |= dict(_losses(run))
    facts |= dict(_speed(run))
    facts |= dict(_parts(run.job))
    facts |= dict(_plan_rows(run.plan()))
    versions = run.provenance()
    if "torch" in versions:
        facts["software"] = f"torch {versions['torch']}, Python {versions['python']}"
    facts["folder"] = f"{run.folder} ({size_text(state.size)})"
    facts |= {"problem": state.problem} if state.problem else {}
    return facts


def _losses(run: ReportRun) -> Iterator[tuple[str, Cell]]:
    losses = run.metrics.column("loss")[1].tolist()
    if losses:
        count = len(last_values(losses))
        mean = f" (mean of the last {count:,} steps {mean_of_last(losses):.4f})" if count > 1 else ""
        yield "training loss", f"{final_loss(losses):.4f}{mean}"
    skipped = int(run.metrics.column("skipped")[1].astype(bool).sum())
    if skipped:
        yield "updates skipped", f"{skipped:,}"
    for name in _evaluated(run):
        steps, values = run.metrics.evaluations.column(name)
        rows = list(zip(values.tolist(), steps.tolist(), strict=True))
        finite = [row for row in rows if math.isfinite(row[0])]
        words = f"{rows[-1][0]:.4f}"
        if finite and len(rows) > 1:
            best = max(finite) if name.endswith(BETTER_IS_MORE) else min(finite)
            # The best one is named unless it is the last
            words += "" if best[1] == rows[-1][1] else f" (best {best[0]:.4f} at step {best[1]:,})"
        yield name, words


def _evaluated(run: ReportRun) -> list[str]:
    """Metrics of evaluations that are losses, rates or accuracies; a report has the others as curves."""
    shown = ("loss", "bits_per_byte", *BETTER_IS_MORE)
    return [name for name in run.metrics.evaluations.numbers() if name.endswith(shown)][:6]


def _speed(run: ReportRun) -> Iterator[tuple[str, Cell]]:
    seconds, speeds, shares = (run.metrics.column(name)[1] for name in ("step_seconds", "tokens_per_second", "mfu"))
    if len(seconds):
        yield "time in steps", f"{_duration(float(seconds.sum()))} ({_duration(median(seconds))} a step, median)"
    if len(speeds):
        yield "tokens a second", f"{median(speeds):,.0f} (median)"
    if len(shares):
        yield "MFU", f"{100 * median(shares):.1f} % (median)"


def _duration(seconds: float) -> str:
    for unit, scale in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * scale:
            return f"{seconds / scale:.1f} {unit}"
    return f"{seconds:.3g} s"


def _parts(job: Mapping[str, Any]) -> Iterator[tuple[str, Cell]]:
    for name in ("model", "optimizer", "scheduler"):
        table = job.get(name, {})
        if type_ := str(table.get("type", "")).rpartition("/")[2]:
            rate = table.get("lr")
            yield name, type_ + (f", rate {rate:g}" if isinstance(rate, int | float) else "")
    train = job.get("train", {})
    if "global_batch_size" in train and "seq_len" in train:
        largest = "at most " if "batch_schedule" in train else ""
        yield "batch", f"{largest}{train['global_batch_size']:,} sequences of {train['seq_len']:,} tokens"


def _plan_rows(plan: str) -> Iterator[tuple[str, Cell]]:
    """Lines of the plan whose first word names what they are about."""
    wanted = {"model": "parameters", "device": "device"}
    for line in plan.splitlines():
        word, _, words = line.partition(" ")
        if word in wanted and words.startswith(" "):
            # Removed, so that only the first line of each word counts
            yield wanted.pop(word), words.strip().partition(" parameters")[0]
