"""Schedules of the learning rate, and what all of them share: the warm-up.

Updates are numbered from 0. Warm-up over W updates gives the factors 1/W, 2/W, …, 1, so that no update is wasted at a
rate of zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge

from forge_core.components import SchedulerComponent
from forge_core.errors import Problem

if TYPE_CHECKING:
    from forge_core.config.job import Job
    from forge_core.context import BuildContext
    from forge_core.parallel.layout import Layout
    from forge_core.protocols import Schedule


def warmup(step: int, warmup_steps: int) -> float:
    """Factor of update `step` in a linear warm-up: (step + 1) / warmup_steps, then 1."""
    return min(1.0, (step + 1) / max(warmup_steps, 1))


def progress(step: int, start: int, length: int) -> float:
    """How much of the phase of `length` updates that begins with update `start` lies before `step`: in [0, 1].

    The last update of the phase is at 1 - 1/length: it still moves the weights when the phase leads to zero.
    """
    return min(1.0, max(0.0, (step - start) / max(length, 1)))


@frozen(kw_only=True)
class WarmupComponent(SchedulerComponent):
    """A schedule that begins with a linear warm-up."""

    warmup_steps: int = field(default=0, validator=ge(0))
    """Updates over which the rate grows linearly to its base value; the first is at 1/warmup_steps of it. 0: none."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        if self.warmup_steps > job.train.steps:
            message = f"{self.warmup_steps} is longer than the run; train.steps is {job.train.steps}"
            yield Problem("warmup_steps", message)


@frozen(kw_only=True)
class Constant(WarmupComponent):
    """The base rate throughout, after an optional warm-up."""

    def build(self, context: BuildContext) -> Schedule:
        return lambda step, total: warmup(step, self.warmup_steps)
