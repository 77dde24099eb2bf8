"""Metrics on the terminal, and what takes long before and between them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from attrs import field, frozen
from attrs.validators import ge, gt

from forge_core.contracts.components import LoggerComponent
from forge_core.contracts.phase import COMPUTING, Phase
from forge_core.launch.progress_beacon import ProgressBeacon, clock
from forge_core.launch.rank_process import this_process

if TYPE_CHECKING:
    from rich.console import Console as Terminal

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.runtime import Logger


@frozen(kw_only=True)
class Console(LoggerComponent):
    """A live progress line on a terminal, plain lines anywhere else."""

    style: Literal["auto", "live", "plain", "off"] = "auto"
    """auto: live on a terminal, plain otherwise."""
    interval: int = field(default=0, validator=ge(0))
    """Steps between plain lines; 0: about fifty lines in the whole run."""
    every: float = field(default=60.0, validator=gt(0))
    """Seconds after which there is another plain line in any case, in the middle of a step too."""

    @cached_property  # one for all: lines from elsewhere would break the one that is redrawn
    def terminal(self) -> Any:  # a rich Console; attrs takes its type for a field's, read before rich is imported
        from rich.console import Console as Terminal  # late: importing rich takes longer than reading a job

        return Terminal(highlight=False, quiet=self.style == "off" or this_process.verbosity < 0)

    def build(self, context: BuildContext) -> Logger:
        terminal, steps = self.terminal, context.job.train.steps
        if self.style == "live" or (self.style == "auto" and terminal.is_terminal):
            return LiveLogger(terminal, steps)
        usual = 1 if this_process.verbosity > 0 else max(1, steps // 50)
        return PlainLogger(terminal, steps, self.interval or usual, self.every)


@contextmanager
def showing_progress(loggers: Mapping[str, LoggerComponent]) -> Iterator[None]:
    """Show phases that last a second or more, as set in `[loggers.console]`; in a thread, as the main one is busy."""
    console, ended = next((each for each in loggers.values() if isinstance(each, Console)), None), threading.Event()

    def show(console: Console) -> None:
        terminal, last = console.terminal, 0.0
        shown: set[str] = {Phase.DATA, *COMPUTING}
        while not ended.wait(min(console.every, 1.0)):
            now, since, work = time.monotonic(), ProgressBeacon.since, ProgressBeacon.detail or ProgressBeacon.phase
            is_new = work not in shown  # a second evaluation of some seconds needs no line, only a long one
            if now - since >= (1.0 if is_new else console.every) and (is_new or now - last >= console.every):
                shown, last = {*shown, work}, now
                terminal.print(ProgressBeacon.describe(), soft_wrap=True)

    if console is not None:
        threading.Thread(target=show, args=[console], name="forge-progress", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


class LiveLogger:
    """One progress line that is redrawn; evaluations are printed above it."""

    def __init__(self, terminal: Terminal, steps: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar, self._steps = BarColumn(24), steps
        columns = MofNCompleteColumn(), self._bar, TimeRemainingColumn(), TextColumn("{task.description}")
        self._progress = Progress(*columns, console=terminal, refresh_per_second=4)
        self._task = self._progress.add_task("starting", total=steps)

    def start(self, step: int) -> None:
        # Set before it starts, so that a run that continues does not show a bar at 0 first.
        self._progress.update(self._task, completed=step)
        self._progress.start()

    def log(self, record: Mapping[str, Any]) -> None:
        if "loss" in record:
            self._progress.update(self._task, completed=record["step"], description=self._fitted(describe(record)))
        else:
            self._progress.console.print(f"step {record['step']}  {describe_evaluation(record)}", style="cyan")

    def _fitted(self, description: str) -> str:
        """Drop metrics from the right until step, time and loss fit into a narrow terminal."""
        self._bar.bar_width = 24 if (width := self._progress.console.width) >= 100 else 8
        room = width - 2 * len(str(self._steps)) - self._bar.bar_width - len("/  0:00:00 left  ")
        parts = description.split("  ")
        while len(parts) > 1 and len("  ".join(parts)) > room:
            parts.pop()
        return "  ".join(["left", *parts])

    def close(self) -> None:
        self._progress.stop()


class PlainLogger:
    """A line every `interval` steps and every `every` seconds, and one for each evaluation."""

    def __init__(self, terminal: Terminal, steps: int, interval: int, every: float) -> None:
        self._terminal, self._steps, self._interval, self._every = terminal, steps, interval, every

    def start(self, step: int) -> None:
        self._first, self._began = step, time.perf_counter()
        self._last = self._began  # time of the last line

    def log(self, record: Mapping[str, Any]) -> None:
        step, due = record["step"], time.perf_counter() - self._last >= self._every
        if "loss" not in record:
            self._print(f"step {step}/{self._steps}  {describe_evaluation(record)}")
        # The first step shows at once that the run trains; a skipped update is never left out.
        elif due or step % self._interval == 0 or step in (self._first + 1, self._steps) or record.get("skipped"):
            # From the steps of this process alone: a run that continues may be on other machines than before.
            elapsed = time.perf_counter() - self._began
            self._print(
                f"step {step}/{self._steps}  {describe(record)}  {clock(elapsed)} so far, "
                f"{clock(elapsed / (step - self._first) * (self._steps - step))} left"
            )

    def close(self) -> None:
        pass

    def _print(self, line: str) -> None:
        self._last = time.perf_counter()
        self._terminal.print(line, soft_wrap=True)  # else rich breaks lines at 80 columns where output goes to a file


def describe(record: Mapping[str, Any]) -> str:
    """The main numbers of a training line."""
    parts = [f"loss {record['loss']:.4f}", f"grad norm {record['grad_norm']:.3g}", f"lr {record['lr']:.3g}"]
    parts.append(f"{record['tokens_per_second']:,.0f} tokens/s")
    if "mfu" in record:
        parts.append(f"MFU {record['mfu']:.1%}")
    if "peak_reserved_gb" in record:  # of a GPU: the resident set of a CPU is mostly torch and the data
        parts.append(f"{record['peak_memory_gb']:.1f} GB")
    if record.get("skipped"):
        parts.append("update skipped")
    return "  ".join(parts)


def describe_evaluation(record: Mapping[str, Any]) -> str:
    """All numbers of an evaluation line."""
    return "  ".join(f"{name} {value:.4f}" for name, value in record.items() if name != "step" and "tokens" not in name)
