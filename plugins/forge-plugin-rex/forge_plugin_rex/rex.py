"""The component `rex`."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import gt, optional

from forge_kit.optim.schedules import DecayComponent


@frozen(kw_only=True)
class REX(DecayComponent):
    """Reflected exponential (Chen, Wolfe and Kyrillidis 2021, "REX: Revisiting Budgeted Training").

    With the completed share p of the decay, the remaining share of the way down is (1 - p) / (1/2 + (1 - p)/2): slow at
    first, and steep at the end, for every length of the run.
    """

    power: float | None = field(default=None, validator=optional(gt(0)))
    """(1 - p) to this power instead: below 1 a late decay like the published one, 1 a straight line."""

    def shape(self, progress: float) -> float:
        left = 1 - progress
        return left / (0.5 + 0.5 * left) if self.power is None else left**self.power
