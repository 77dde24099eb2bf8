"""The component `inverse_sqrt`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge

from forge_core.contracts.errors import Problem
from forge_core.schedules import WarmupComponent, warmup

if TYPE_CHECKING:
    from forge_core.config.job import Job
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.optimizer import Schedule


@frozen(kw_only=True)
class InverseSqrt(WarmupComponent):
    """Warm up, then fall with the inverse square root of the update (Vaswani et al. 2017, section 5.3).

    It does not know how long the run is. n updates after the warm-up the factor is sqrt(t / (t + n)), t the timescale;
    with the timescale of the paper, which is the warm-up, that is sqrt(warmup_steps / update).
    """

    timescale: int = field(default=0, validator=ge(0))
    """Updates after the warm-up in which the rate falls to 0.71 of its base value; 0: as many as the warm-up has."""

    def build(self, context: BuildContext) -> Schedule:
        timescale = self.timescale or self.warmup_steps

        def schedule(step: int, total: int) -> float:
            after = max(0, step + 1 - self.warmup_steps)
            return warmup(step, self.warmup_steps) * math.sqrt(timescale / (timescale + after))

        return schedule

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        yield from super().problems(job, layout)
        if not (self.timescale or self.warmup_steps):
            yield Problem("timescale", "is 0, and so is warmup_steps, which it stands for; give one of them")
