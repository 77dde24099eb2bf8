"""What decaying schedules share: warm up, then go from 1 to a floor along some shape."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import and_, ge, le

from forge_core.errors import Problem
from forge_core.schedules import WarmupComponent, progress, warmup

if TYPE_CHECKING:
    from forge_core.config.job import Job
    from forge_core.context import BuildContext
    from forge_core.parallel.layout import Layout
    from forge_core.protocols import Schedule


@frozen(kw_only=True)
class DecayComponent(WarmupComponent):
    """A schedule that decays right after the warm-up. Subclasses give its `shape`."""

    decay_steps: int = field(default=0, validator=ge(0))
    """Updates over which the rate decays; afterwards it stays at the floor. 0: until the end of the run."""
    min_ratio: float = field(default=0.0, validator=and_(ge(0), le(1)))
    """The floor, as a share of the base rate."""

    def shape(self, progress: float) -> float:
        """What is left of the way down: from 1 at progress 0 to 0 at progress 1."""
        raise NotImplementedError

    def build(self, context: BuildContext) -> Schedule:
        def schedule(step: int, total: int) -> float:
            if step < self.warmup_steps:
                return warmup(step, self.warmup_steps)
            left = self.shape(progress(step, self.warmup_steps, self.decay_steps or total - self.warmup_steps))
            return self.min_ratio + (1 - self.min_ratio) * left

        return schedule

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        yield from super().problems(job, layout)
        end = self.warmup_steps + self.decay_steps
        if self.decay_steps and end > job.train.steps:
            message = (
                f"warmup_steps {self.warmup_steps} + decay_steps {self.decay_steps} = {end} updates are more than "
            )
            yield Problem("decay_steps", f"{message}train.steps {job.train.steps}; 0 decays until the end")
