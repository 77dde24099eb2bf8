"""The schedule template_name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import gt

from forge_core.schedules import WarmupComponent, warmup
from forge_kit.optim.schedules import progress

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.optimizer import Schedule


@frozen(kw_only=True)
class TemplateName(WarmupComponent):
    """A warm-up, then a fall to zero along (1 - p)^power, where p is the completed share of the rest of the run."""

    power: float = field(default=1.5, validator=gt(0))
    """1: a straight line; more: the rate falls early; less: late."""

    def build(self, context: BuildContext) -> Schedule:
        def factor(step: int, total: int) -> float:
            over = progress(step, self.warmup_steps, total - self.warmup_steps)
            return warmup(step, self.warmup_steps) * (1.0 - over) ** self.power

        return factor
