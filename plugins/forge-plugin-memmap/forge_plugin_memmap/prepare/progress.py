"""How far it is, for a person who waits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from forge_plugin_memmap.prepare.folder import State

LINES = 10
"""Lines in all, where there is no terminal to draw a bar on."""


class Meter(Protocol):
    """Is called with every state that is reached."""

    def update(self, state: State) -> None: ...


@contextmanager
def open_meter(console: Console, total_bytes: int, state: State) -> Iterator[Meter]:
    """A bar on a terminal, a few lines elsewhere. `state`: where this process begins."""
    speed = Speed(state.tokens)
    if not console.is_terminal:
        yield Lines(console, total_bytes, state, speed)
        return
    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[counts]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield Bar(progress, total_bytes, state, speed)


class Speed:
    """Tokens a second of this process."""

    def __init__(self, tokens: int) -> None:
        self._tokens, self._began = tokens, time.monotonic()

    def describe(self, state: State) -> str:
        return f"{state.documents:,} documents  {state.tokens:,} tokens  {self.per_second(state):,.0f} tokens/s"

    def per_second(self, state: State) -> float:
        return (state.tokens - self._tokens) / max(time.monotonic() - self._began, 1e-9)


class Bar:
    """See `Meter`."""

    def __init__(self, progress: Progress, total_bytes: int, state: State, speed: Speed) -> None:
        self._progress, self._speed = progress, speed
        counts = speed.describe(state)
        self._task = progress.add_task("", total=total_bytes, completed=state.place.passed, counts=counts)

    def update(self, state: State) -> None:
        self._progress.update(self._task, completed=state.place.passed, counts=self._speed.describe(state))


class Lines:
    """See `Meter`."""

    def __init__(self, console: Console, total_bytes: int, state: State, speed: Speed) -> None:
        self._console, self._total, self._speed = console, max(total_bytes, 1), speed
        self._shown = self._tenth(state)

    def update(self, state: State) -> None:
        tenth = self._tenth(state)
        if tenth > self._shown:
            self._shown = tenth
            self._console.print(f"{100 * tenth // LINES:3} %  {self._speed.describe(state)}", highlight=False)

    def _tenth(self, state: State) -> int:
        return LINES * state.place.passed // self._total
