"""Decay of the learning rate after a warm-up, which several schedules share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import and_, ge, le

from forge_core.contracts.errors import Problem
from forge_core.schedules import WarmupComponent, warmup

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.optimizer import Schedule
    from forge_core.job import Job


def progress(step: int, start: int, length: int) -> float:
    """Returns the fraction of the phase of `length` updates from update `start` on that lies before `step`: in [0, 1].

    The last update of the phase is at 1 - 1/length: it still moves the weights when the phase leads to zero.
    """
    # A phase may have no updates, as where the warm-up takes the whole run
    return min(1.0, max(0.0, (step - start) / max(length, 1)))


@frozen(kw_only=True)
class DecayComponent(WarmupComponent):
    """A schedule that decays right after the warm-up. Subclasses define its `shape`."""

    decay_steps: int = field(default=0, validator=ge(0))
    """Updates over which the rate decays; afterwards it stays at the floor. 0: until the end of the run."""
    min_ratio: float = field(default=0.0, validator=and_(ge(0), le(1)))
    """The floor, as a share of the base rate."""

    def shape(self, progress: float) -> float:
        """Returns the remaining fraction of the decay: from 1 at progress 0 to 0 at progress 1."""
        raise NotImplementedError

    def build(self, context: BuildContext) -> Schedule:
        """Warm-up, then from the base rate down to the floor along `shape`, and the floor from there on."""

        def schedule(step: int, total: int) -> float:
            if step < self.warmup_steps:
                return warmup(step, self.warmup_steps)
            left = self.shape(progress(step, self.warmup_steps, self.decay_steps or total - self.warmup_steps))
            return self.min_ratio + (1 - self.min_ratio) * left

        return schedule

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that warm-up and decay together end within the run."""
        yield from super().problems(job, layout)
        end = self.warmup_steps + self.decay_steps
        if self.decay_steps and end > job.train.steps:
            message = (
                f"warmup_steps {self.warmup_steps} + decay_steps {self.decay_steps} = {end} updates are more than "
            )
            message += f"train.steps {job.train.steps}; 0 decays until the end"
            yield Problem("decay_steps", message, fits=0)
