"""The section `goodput` of `forge-run report`: where the time of each run went."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from attrs import frozen

from forge_core.contracts.errors import JobError
from forge_kit.tools.report_sections import Bars, Block, Cell, Paragraph, ReportRun, ReportSection, Table
from forge_plugin_resilience.goodput.accounting import CLASSES
from forge_plugin_resilience.goodput.report import attempt_rows, facts_of, headline, sentences
from forge_plugin_resilience.goodput.run_account import RunAccount, read_run
from forge_plugin_resilience.goodput.words import duration, share

GROUPS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "productive": ("#3f8f5f", ("productive",)),
    "made again or undone": ("#c1121f", ("made_again", "undone")),
    "saves": ("#4e79a7", ("save",)),
    "evaluations": ("#b07aa1", ("evaluation",)),
    "starting": ("#e0a030", ("initialisation", "preparation", "restore", "first_step")),
    "data, hooks, other": ("#76b7b2", ("data", "hooks", "other", "open")),
    "nothing ran": ("#9aa3ab", ("down", "queue", "silent")),
}
"""Classes as the bars have them: colour, and which of the account they are."""


@frozen(kw_only=True)
class GoodputSection(ReportSection):
    """Productive share of each run's time, the other classes, and its starts; from `events.jsonl`."""

    title: ClassVar[str] = "Where the time went"
    place: ClassVar[float] = 70.0

    def blocks(self, runs: Sequence[ReportRun]) -> Iterable[Block]:
        """Yields bars and classes of all runs together, then the starts of each; nothing if no run has events."""
        accounts = [(run, account) for run in runs if (account := _account(run))]
        if not accounts:
            return
        facts = [(run, facts_of(account)) for run, account in accounts]
        parts = {name: color for name, (color, _) in GROUPS.items()}
        bars = [(run, _sizes(each)) for run, each in facts]
        yield Bars(title="Time, from the first start on", parts=parts, rows=bars)
        yield Table(head=["class", *(run for run, _ in facts), ""], rows=[*_class_rows([each for _, each in facts])])
        for run, each in facts:
            head, *rows = attempt_rows(each)
            yield Table(title=f"Starts of {run.name}", head=head, rows=rows, folded=len(rows) < 2)
            yield Paragraph(text=". ".join([headline(each), *sentences(each)]) + ".")


def _account(run: ReportRun) -> RunAccount | None:
    try:
        account = read_run(run.folder)
    except JobError:
        return None  # without any time in its lines
    return account if account.account is not None else None


def _sizes(facts: Mapping[str, Any]) -> list[float]:
    # `other` is what rounding leaves, and may be below 0
    return [sum(max(0.0, facts["classes"][name]) for name in names) for _, names in GROUPS.values()]


def _class_rows(facts: Sequence[Mapping[str, Any]]) -> Iterable[list[Cell]]:
    for name, words in CLASSES.items():
        if any(each["classes"][name] >= 0.0005 * each["lifetime_s"] for each in facts):
            cells = [
                f"{duration(each['classes'][name])} ({share(each['classes'][name], each['lifetime_s'])})"
                for each in facts
            ]
            yield [name.replace("_", " "), *cells, words]
