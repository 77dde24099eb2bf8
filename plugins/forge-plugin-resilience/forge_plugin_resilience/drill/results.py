"""The effect of a fault on a run, judged against the run without a fault."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from attrs import asdict, define

Curve = Mapping[int, float]
"""Loss by step."""


@define(kw_only=True)
class Result:
    """One fault on one rank."""

    fault: str
    rank: int
    title: str
    held: bool = False
    """Whether the run did what it should."""
    found_after_s: float | None = None
    """Seconds from the injection to the end of the run, or to its message if the run continues."""
    said: str = ""
    """What the run has recorded about it, in words."""
    steps_lost: int | None = None
    """Steps that were made again, or given up."""
    back_after_s: float | None = None
    """Seconds from the restart to the end of the first step; None where the run went on by itself."""
    curve: str = ""
    """How the losses compare with the losses of the run without a fault."""
    reason: str = ""
    """Why it did not hold."""
    fix: str = ""
    """Keys to set."""
    note: str = ""
    """Remark, such as a limit that differs from the job's."""
    log: str = ""

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def fail(self, reason: str, fix: str = "") -> None:
        """Note a reason why it did not hold; the first one stays the first."""
        self.reason = f"{self.reason}; {reason}" if self.reason else reason
        self.fix = self.fix or fix


def first_difference(one: Curve, other: Curve) -> int | None:
    """The first step whose losses are not equal to the bit, or which only one of two curves has; None without any."""
    for step in sorted({*one, *other}):
        a, b = one.get(step), other.get(step)
        if a is None or b is None or not (a == b or (math.isnan(a) and math.isnan(b))):
            return step
    return None


def deviation(one: Curve, other: Curve) -> float:
    """The largest relative difference; infinite if a step is missing, or not finite on one side only."""
    if one.keys() != other.keys():
        return math.inf
    pairs = [(one[step], other[step]) for step in one]
    return max((_relative(a, b) for a, b in pairs), default=0.0)


def _relative(a: float, b: float) -> float:
    # Two NaN are the same outcome, though not equal
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b))
