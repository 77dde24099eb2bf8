"""Where a rank is in its work, and whether it moves: the watchdogs of all ranks judge a hang by it."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen


@frozen
class Position:
    """A phase that a rank has entered."""

    count: int
    """Phases entered so far. All ranks go through the same ones in one order, so the smallest count is behind."""
    step: int
    """Number of the current step, from 1; 0 before the first."""
    phase: str


class ProgressBeacon:
    """Keeps the position of this rank. Entering a phase costs about a microsecond."""

    # On the class: a tokenizer that reports knows no run. Without a lock: of two reports at once one may be lost
    reports: ClassVar[int] = 0
    """Calls of `report_progress` in this process, from any thread."""
    detail: ClassVar[str] = ""
    """Text of the last report."""

    def __init__(self) -> None:
        self.position = Position(0, 0, "start-up")

    def enter(self, phase: str, step: int | None = None) -> None:
        """Note that a phase of a step begins, by default of the same step as the phase before."""
        before = self.position
        # A new object in one assignment: the watchdog's thread reads it at any time, without a lock
        self.position = Position(before.count + 1, before.step if step is None else step, phase)
        ProgressBeacon.detail = ""


def report_progress(detail: str = "") -> None:
    """Report that this rank moves, from inside work that takes longer than a second.

    A run in which no rank has moved for `launch.hang_timeout_s` is ended as a hang; each phase of the engine and each
    call of this function is a move. Tokenizing, building a cache, downloading or saving calls it once for every
    document, file or batch. It costs about a microsecond, may be called from any thread of a rank's process (not from a
    worker process, which the watchdog does not see), and does nothing where no run is watched. When a run hangs,
    `detail` is shown beside the phase: work done so far, such as `"3 of 7 files"`.
    """
    ProgressBeacon.reports += 1
    ProgressBeacon.detail = detail
