"""Whether a run that owns its folder moves on: by the age of its last line and the pace of those before."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Literal

from attrs import frozen

from forge_plugin_runs.words import age_text

Life = Literal["alive", "late", "silent"]
LIVES: Mapping[Life, str] = {
    "alive": "its last line is as old as its pace allows",
    "late": "no line for ten times the median step: it evaluates or saves, or something is slow",
    "silent": "no line for twice its longest pause so far, evaluations and saves included, and a minute at least",
}
LATE = 10.0
"""Multiple of the median step from which a run is late."""
LEAST_LATE_S = 5.0
"""Seconds for which no run is late: lines of a network file system arrive with a delay."""
SILENT = 2.0
"""Multiple of the longest pause from which a run is silent."""
LEAST_SILENT_S = 60.0
START_S = 600.0
"""Seconds within which a start makes its first step, where its job has no `launch.start_timeout_s`."""
LINES = 1000
"""Lines whose pace counts: the last ones."""


@frozen(kw_only=True)
class Pulse:
    """Signs of life of a run."""

    life: Life
    age_s: float
    """Seconds since its last line, or since it started if it has none yet."""
    step_s: float | None
    """Median seconds of its last steps; None before the first."""

    def __str__(self) -> str:
        if self.step_s is None:
            return f"{self.life}, started {age_text(self.age_s)} ago, no step yet"
        if self.life == "alive":
            return f"alive, last line {age_text(self.age_s)} ago"
        return f"{self.life} for {age_text(self.age_s)}"


def pulse_of(
    records: Sequence[Mapping[str, Any]], *, now: float, started: float | None = None, start_s: float = START_S
) -> Pulse:
    """Judge a run that owns its folder.

    Args:
        records: lines of metrics in order, or the last ones of them.
        now: present time, by the clock of the machine that wrote them.
        started: when the process that owns the folder took it; None: unknown.
        start_s: seconds that a start may take.
    """
    last = list(records)[-LINES:]
    seconds = [float(record["step_seconds"]) for record in last if "step_seconds" in record]
    times = [float(record["time"]) for record in last if "time" in record]
    # No line yet, or only lines of earlier starts
    if not times or (started is not None and times[-1] < started):
        age_s = now - (started if started is not None else now)
        return Pulse(life="alive" if age_s <= start_s else "silent", age_s=max(0.0, age_s), step_s=None)
    # Clocks of two machines differ: a line may seem to come from the future
    step_s, age_s = median(seconds) if seconds else 0.0, max(0.0, now - times[-1])
    # Pauses between starts are none of the run that is running
    own = [time for time in times if started is None or time >= started]
    pauses = [later - earlier for earlier, later in itertools.pairwise(own)]
    late_s = max(LATE * step_s, LEAST_LATE_S)
    # Never before `late_s`, so that a run is late first
    silent_s = max(SILENT * max(pauses, default=0.0), late_s, LEAST_SILENT_S)
    life: Life = "silent" if age_s > silent_s else "late" if age_s > late_s else "alive"
    return Pulse(life=life, age_s=age_s, step_s=step_s)
