"""The report on a terminal, or as plain text."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from forge_plugin_plan.doctor.examination import Examined
from forge_plugin_plan.doctor.results import State

STYLES = {State.OK: "green", State.WARNING: "yellow", State.FAILED: "bold red", State.NOT_RUN: "dim"}
NAME = 18
"""Width of the column of names."""


class Screen:
    """Prints results as they come, with a heading for each group."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, markup=False, emoji=False)
        self._group = ""

    def show(self, examined: Examined) -> None:
        """Print a result and, below it, how to fix a problem."""
        if examined.group != self._group:
            self._console.print(Text(("\n" if self._group else "") + examined.group, style="bold"))
            self._group = examined.group
        result = examined.result
        seen = Text(result.seen)
        if result.mend:
            seen.append(f"\n→ {result.mend}", style="cyan")
        table = Table.grid(padding=(0, 1))
        table.add_column(width=max(map(len, State)))
        table.add_column(width=NAME)
        table.add_column()
        table.add_row(Text(result.state, style=STYLES[result.state]), result.name, seen)
        self._console.print(table)
