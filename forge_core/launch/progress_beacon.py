"""The position of a rank in its work, and whether it moves: shown to users, and judged by watchdogs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import ClassVar

from attrs import frozen

from forge_core.contracts.phase import Phase


@frozen
class Position:
    """A phase that a rank has entered."""

    count: int
    """Phases entered so far. All ranks go through the same ones in one order, so the smallest count is behind."""
    step: int
    """Number of the current step, from 1; 0 before the first."""
    phase: Phase
    hook: str = ""
    detail: str = ""

    @property
    def name(self) -> str:
        """The phase as `ProgressBeacon.seconds` has it: batches of an evaluation are one, each hook is another."""
        return f"{self.phase} {self.hook}" if self.hook else self.phase

    def __str__(self) -> str:
        return f"{self.name}, {self.detail}" if self.detail else self.name


class ProgressBeacon:
    """Keeps the position of this rank. Entering a phase costs about a microsecond."""

    # On the class, as a tokenizer that reports has no run. Without a lock: of two simultaneous reports one may be lost
    reports: ClassVar[int] = 0
    """Calls of `report_progress` in this process, from any thread."""
    phase: ClassVar[str] = Phase.IMPORTS
    detail: ClassVar[str] = ""
    """Text of the last report that had one."""
    done, total = 0.0, 0.0
    listeners: ClassVar[list[Callable[[str], object]]] = []
    """Called with the name of each phase as it begins, by the thread that enters it: a profiler marks them."""
    since: ClassVar[float] = time.monotonic()
    """When the phase began, or the work in it of which `total` is the amount."""

    def __init__(self) -> None:
        self.position = Position(0, 0, Phase.START)
        self._spent: dict[str, float] = {}
        self._entered = time.perf_counter()
        self.entered: Counter[str] = Counter()
        """How often each phase was entered."""

    def enter(self, phase: Phase, step: int | None = None, hook: str = "", detail: str = "") -> None:
        """Note that a phase of a step begins, by default of the same step as the phase before."""
        before, now = self.position, time.perf_counter()
        self._spent[before.name] = self._spent.get(before.name, 0.0) + now - self._entered
        self._entered = now
        # A new object in one assignment: the watchdog's thread reads it at any time, without a lock
        self.position = Position(before.count + 1, before.step if step is None else step, phase, hook, detail)
        name = self.position.name
        self.entered[name] += 1
        if name != ProgressBeacon.phase:
            ProgressBeacon.phase, ProgressBeacon.since = name, time.monotonic()
            ProgressBeacon.detail, ProgressBeacon.done, ProgressBeacon.total = "", 0.0, 0.0
        for listener in self.listeners:
            listener(name)

    def seconds(self) -> dict[str, float]:
        """Seconds of this rank in each phase so far, the present one included."""
        present = self.position.name
        return {**self._spent, present: self._spent.get(present, 0.0) + time.perf_counter() - self._entered}

    @classmethod
    def describe(cls) -> str:
        """The present work in words, with its share that is done, and the time it has taken and will take."""
        elapsed = time.monotonic() - cls.since
        share = min(cls.done / cls.total, 1.0) if cls.total else 0.0
        subject, passed = ": ".join(filter(None, [cls.phase, cls.detail])), f"{clock(elapsed)} so far"
        left = f"{share:.0%}, {passed}, {clock(elapsed / share - elapsed)} left" if share else passed
        return f"{subject}, {left}"


def clock(seconds: float) -> str:
    """Seconds as `h:mm:ss`."""
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}"


def report_progress(detail: str = "", done: float = 0, total: float = 0) -> None:
    """Report that this rank moves, from inside work that takes longer than a second.

    A run in which no rank has moved for `launch.hang_timeout_s` is ended as a hang; each phase of the engine and each
    call of this function is a move. Tokenizing, building a cache, downloading or saving calls it once for every
    document, file or batch. It costs about a microsecond, may be called from any thread of a rank's process (not from a
    worker process, which the watchdog does not see), and does nothing where no run is watched.

    Users see `detail` beside the phase, the kind of work such as `"encoding text"` (empty: the earlier text stays), and
    the remaining time, computed from the amounts `done` and `total`, in any unit (0: not known).
    """
    ProgressBeacon.reports += 1
    if total and (detail != ProgressBeacon.detail or total != ProgressBeacon.total):
        ProgressBeacon.since = time.monotonic()  # the speed of other work does not apply
    if detail or total:
        ProgressBeacon.detail, ProgressBeacon.done, ProgressBeacon.total = detail, done, total
