"""What the component `console` builds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console as Terminal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from forge_core.metrics.console import describe, describe_evaluation


class SilentLogger:
    """Prints nothing."""

    def start(self, step: int) -> None:
        pass

    def log(self, record: Mapping[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


class LiveLogger:
    """One line that is rewritten; evaluations scroll past above it."""

    def __init__(self, terminal: Terminal, steps: int) -> None:
        columns = (
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )
        self._progress = Progress(*columns, console=terminal, refresh_per_second=4)
        self._task = self._progress.add_task("starting", total=steps)

    def start(self, step: int) -> None:
        self._progress.update(self._task, completed=step)
        self._progress.start()

    def log(self, record: Mapping[str, Any]) -> None:
        if "loss" in record:
            self._progress.update(self._task, completed=record["step"], description=describe(record))
        else:
            self._progress.console.print(f"step {record['step']}  {describe_evaluation(record)}", style="cyan")

    def close(self) -> None:
        self._progress.stop()


class PlainLogger:
    """A line every so many steps, and one for each evaluation."""

    def __init__(self, terminal: Terminal, steps: int, interval: int) -> None:
        self._terminal = terminal
        self._steps = steps
        self._interval = interval
        self._first = 0
        self._began = time.perf_counter()

    def start(self, step: int) -> None:
        self._first, self._began = step, time.perf_counter()

    def log(self, record: Mapping[str, Any]) -> None:
        step = record["step"]
        if "loss" not in record:
            self._print(f"step {step}/{self._steps}  {describe_evaluation(record)}")
        elif step % self._interval == 0 or step in (self._first + 1, self._steps) or record.get("skipped"):
            self._print(f"step {step}/{self._steps}  {describe(record)}  {self._remaining(step)}")

    def close(self) -> None:
        pass

    def _print(self, line: str) -> None:
        self._terminal.print(line, soft_wrap=True)

    def _remaining(self, step: int) -> str:
        seconds = (time.perf_counter() - self._began) / (step - self._first) * (self._steps - step)
        return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02} left"
