"""The component `wsd`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Literal

from attrs import field, frozen
from attrs.validators import and_, ge, le

from forge_core.contracts.components import when_resumed
from forge_core.contracts.errors import Problem
from forge_core.schedules import WarmupComponent, warmup
from forge_kit.optim.schedules import progress

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.optimizer import Schedule
    from forge_core.job import Job

SHAPES: Mapping[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "sqrt": lambda progress: 1 - math.sqrt(progress),
}
"""Remaining share of the way down, by progress of the decay."""


DECAY_FRACTION = 0.2


@frozen(kw_only=True)
class WSD(WarmupComponent):
    """Warm up, stay at the base rate, decay at the end (Hu et al. 2024, MiniCPM).

    The length of the stable phase is not fixed: a run can be prolonged, or decayed from any checkpoint of that phase.
    The keys of the decay are therefore safe to change when a run continues: nothing before it depends on them. Hägele
    et al. 2024 find that the decay `sqrt`, 1 - sqrt(progress), over 20 % of the run matches a cosine of the same
    length.
    """

    decay_steps: int = field(default=0, validator=ge(0), metadata=when_resumed("safe"))
    """Updates of the decay, which ends with the run; 0: `decay_fraction` of the run."""
    decay_fraction: float = field(default=DECAY_FRACTION, validator=and_(ge(0), le(1)), metadata=when_resumed("safe"))
    """Share of the run that decays, 0 for none; set this or `decay_steps`."""
    shape: Literal["linear", "cosine", "sqrt"] = field(default="sqrt", metadata=when_resumed("safe"))
    """Curve of the decay; `sqrt` is 1 - sqrt(progress)."""
    min_ratio: float = field(default=0.0, validator=and_(ge(0), le(1)), metadata=when_resumed("safe"))
    """Rate at the end of the decay, as a share of the base rate."""

    def length_of_decay(self, total: int) -> int:
        """Returns the updates of the decay in a run of `total`."""
        return self.decay_steps or round(self.decay_fraction * total)

    def fitting_warmup(self, steps: int) -> int:
        # Both get shorter, as the stable phase is gone: by the same factor, or the decay keeps its fraction.
        whole = self.warmup_steps + self.decay_steps
        return steps * self.warmup_steps // whole if self.decay_steps else steps - self.length_of_decay(steps)

    def build(self, context: BuildContext) -> Schedule:
        fall = SHAPES[self.shape]

        def schedule(step: int, total: int) -> float:
            decay = self.length_of_decay(total)
            left = fall(progress(step, total - decay, decay)) if decay else 1.0
            return warmup(step, self.warmup_steps) * (self.min_ratio + (1 - self.min_ratio) * left)

        return schedule

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        yield from super().problems(job, layout)
        if self.decay_steps and self.decay_fraction not in (0, DECAY_FRACTION):
            message = f"decay_steps = {self.decay_steps} sets the length of the decay; drop one of them"
            yield Problem("decay_fraction", message)
        decay, total = self.length_of_decay(job.train.steps), job.train.steps
        if self.warmup_steps <= total < self.warmup_steps + decay:
            left = total - self.warmup_steps
            message = f"warm-up ({self.warmup_steps}) and decay ({decay}) overlap in a run of {total} updates"
            message += "; shorten one of them"
            if not self.decay_steps:
                yield Problem("decay_fraction", message, fits=left / total)
            elif left:
                yield Problem("decay_steps", message, fits=left)
            else:
                yield Problem("warmup_steps", message, fits=self.fitting_warmup(total))
