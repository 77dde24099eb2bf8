"""The drill on a terminal, or as plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from rich import box
from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from forge_plugin_resilience.drill.results import Result

WIDE = 150
"""Columns from which the table has what the run said; it is listed below it otherwise."""
SHOWN = 200
"""Characters of a line of the run that are shown."""


class Screen:
    """Progress, and the table at the end. As a context: no spinner outlives it."""

    def __init__(self, quiet: bool) -> None:
        """With `quiet`, progress goes to standard error, and no table is shown."""
        # Without markup: messages of a run may have brackets, which rich would interpret
        self._console = Console(highlight=False, markup=False, emoji=False, stderr=quiet)
        self._status: Status | None = None
        self._begun = ""

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._status = self._console.status("")
            self._status.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._status is not None:
            self._status.stop()

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, soft_wrap=True)

    def begin(self, text: str) -> None:
        """Show the activity that begins now."""
        self._begun = text
        if self._status is None:
            self.say(f"{text} …")
        self.update("")

    def update(self, text: str) -> None:
        """Show how far that is; a terminal only."""
        if self._status is not None:
            self._status.update(Text(f"{self._begun}{': ' if text else ''}{text}"))

    def result(self, result: Result) -> None:
        """Print how a fault ended."""
        mark = Text("  held" if result.held else "  did not hold", style="green" if result.held else "bold red")
        if self._status is not None:
            mark = Text(self._begun) + mark
        self._console.print(mark)

    def table(self, results: Sequence[Result], refused: Mapping[str, str]) -> None:
        """Print all results, and what was not drilled."""
        wide = self._console.width >= WIDE
        table = Table(box=box.SIMPLE_HEAD)
        for name in ("fault", "found after", "steps lost", "back after", "curve"):
            table.add_column(name, justify="right" if name.endswith(("after", "lost")) else "left")
        if wide:
            table.add_column("what the run recorded", overflow="fold")
        for each in results:
            style = "" if each.held else "bold red"
            lost = "–" if each.steps_lost is None else str(each.steps_lost)
            figures = _seconds(each.found_after_s), lost, _seconds(each.back_after_s)
            said = [_short(each.said)] if wide else []
            table.add_row(Text(each.title, style=style), *figures, each.curve or "–", *said)
        self._console.print(table)
        for each in () if wide else results:
            self.say(f"{each.title}: {_short(each.said) or 'nothing was recorded'}")
        for name, reason in refused.items():
            self.say(f"not drilled: {name}: {reason}")
        for each in results:
            if each.note:
                self.say(f"{each.title}: {each.note}")
        for each in results:
            if not each.held:
                self._console.print(Text(f"{each.title} did not hold: {each.reason}", style="bold red"), soft_wrap=True)
                if each.fix:
                    self._console.print(Text(f"→ {each.fix}", style="cyan"), soft_wrap=True)
                self.say(f"  {each.log}")


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} s"
