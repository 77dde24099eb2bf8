"""A number that moves evenly from one value to another: here the momentum of Muon, which begins lower.

    [optimizer]
    type = "muon"
    [optimizer.momentum]
    type = "./ramp.py:Ramp"
    start = 0.85
    end = 0.95
    steps = 300

Any key of an optimizer that may be a schedule takes it, as does `[scheduler]`.
"""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge

from forge_core import SchedulerComponent


@frozen(kw_only=True)
class Ramp(SchedulerComponent):
    """`start` at the first update, `end` after `steps` further ones and from then on."""

    start: float
    """The number at the first update."""
    end: float
    """The number at last."""
    steps: int = field(validator=ge(1))
    """Updates from one to the other."""

    def build(self, context):
        def schedule(step: int, total: int) -> float:
            return self.start + (self.end - self.start) * min(step / self.steps, 1.0)

        return schedule
