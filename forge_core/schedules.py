"""Schedules of the learning rate: `constant`, and the warm-up that other schedules share.

Updates are numbered from 0. The factors of a warm-up are 1/W, 2/W, …, 1: no update is wasted at a rate of zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge

from forge_core.contracts.components import SchedulerComponent
from forge_core.contracts.errors import Problem

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.optimizer import Schedule
    from forge_core.job import Job


def warmup(step: int, warmup_steps: int) -> float:
    """Factor of update `step` in a linear warm-up: (step + 1) / warmup_steps, then 1."""
    return min(1.0, (step + 1) / max(warmup_steps, 1))


@frozen(kw_only=True)
class WarmupComponent(SchedulerComponent):
    """A schedule that begins with a linear warm-up."""

    warmup_steps: int = field(default=0, validator=ge(0))
    """Updates over which the rate grows linearly to its base value; the first is at 1/warmup_steps of it. 0: none."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that the warm-up ends within the run."""
        if self.warmup_steps > job.train.steps:
            yield Problem(
                "warmup_steps",
                f"{self.warmup_steps} is longer than the run; train.steps is {job.train.steps}",
                fits=self.fitting_warmup(job.train.steps),
            )

    def fitting_warmup(self, steps: int) -> int:
        """The warm-up of a run of so few `steps` that this one does not fit."""
        return steps


@frozen(kw_only=True)
class Constant(WarmupComponent):
    """The base rate throughout, after an optional warm-up."""

    def build(self, context: BuildContext) -> Schedule:
        return lambda step, total: warmup(step, self.warmup_steps)
