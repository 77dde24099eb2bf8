"""The components `cosine`, `linear`, `inverse_sqrt`, `none` and `sequential`."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

import attrs
from attrs import field, frozen
from attrs.validators import ge, min_len, optional

from forge_core.contracts.components import SchedulerComponent
from forge_core.contracts.errors import Problem
from forge_core.schedules import WarmupComponent, warmup
from forge_kit.optim.schedules import DecayComponent

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.optimizer import Schedule
    from forge_core.job import Job


@frozen(kw_only=True)
class Cosine(DecayComponent):
    """Half a cosine from the base rate down to the floor (Loshchilov and Hutter 2017, without restarts)."""

    def shape(self, progress: float) -> float:
        """(1 + cos(π progress)) / 2: equation 5 of the paper, for a single period."""
        return 0.5 * (1 + math.cos(math.pi * progress))


@frozen(kw_only=True)
class Linear(DecayComponent):
    """A straight line from the base rate down to the floor."""

    def shape(self, progress: float) -> float:
        """Falls in equal steps: the last of n updates of the decay still has 1/n."""
        return 1 - progress


@frozen(kw_only=True)
class InverseSqrt(WarmupComponent):
    """Warm up, then fall with the inverse square root of the update (Vaswani et al. 2017, section 5.3).

    It is independent of the length of the run. n updates after the warm-up the factor is sqrt(t / (t + n)), t the
    timescale; with the paper's timescale, the warm-up, that is sqrt(warmup_steps / update).
    """

    timescale: int = field(default=0, validator=ge(0))
    """Updates after the warm-up in which the rate falls to 0.71 of its base value; 0: the length of the warm-up."""

    def build(self, context: BuildContext) -> Schedule:
        """Returns sqrt(t / (t + n)) times the factor of the warm-up; the length of the run has no effect."""
        timescale = self.timescale or self.warmup_steps

        def schedule(step: int, _total: int) -> float:
            # Updates count from 0: the last one of the warm-up has the base rate, and so after = 0
            after = max(0, step + 1 - self.warmup_steps)
            return warmup(step, self.warmup_steps) * math.sqrt(timescale / (timescale + after))

        return schedule

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that there is a timescale: with 0, and no warm-up to take it from, every factor would be 0."""
        yield from super().problems(job, layout)
        if not (self.timescale or self.warmup_steps):
            yield Problem("timescale", "is 0, and so is warmup_steps, which it stands for; give one of them")


@frozen(kw_only=True)
class NoSchedule(SchedulerComponent):
    """The base rate from the first update to the last, for optimizers that schedule themselves."""

    def build(self, context: BuildContext) -> Schedule:
        """Returns the constant 1, without the warm-up that `constant` has."""
        return lambda step, total: 1.0


@frozen(kw_only=True)
class SequentialPart:
    """`[[scheduler.parts]]`: one of the schedules, and when it ends."""

    schedule: SchedulerComponent
    """Any schedule. It treats the part as a run that begins at the part's first update and ends where the part ends."""
    scale: float = field(default=1.0, validator=ge(0))
    """Factor on the schedule, for instance to continue from where the part before it ended."""
    until: int | None = field(default=None, validator=optional(ge(1)))
    """Updates of the run after which the next part begins. The last part has none: it ends with the run."""


@frozen(kw_only=True)
class Sequential(SchedulerComponent):
    """Schedules one after the other."""

    parts: tuple[SequentialPart, ...] = field(validator=min_len(1))
    """The parts in order; each but the last sets `until`."""

    def build(self, context: BuildContext) -> Schedule:
        """Builds each part through the context, and passes it steps and a length relative to its own beginning."""
        schedules: list[Schedule] = [context.build(part.schedule) for part in self.parts]
        ends = [part.until for part in self.parts if part.until is not None]

        def schedule(step: int, total: int) -> float:
            # To the right: the update numbered `until` is the first one of the next part
            number = bisect_right(ends, step)
            start, end = ([0, *ends, total][place] for place in (number, number + 1))
            return self.parts[number].scale * schedules[number](step - start, end - start)

        return schedule

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks the ends first: they determine the lengths for which the parts are then checked."""
        problems = list(self._problems_of_ends(job.train.steps))
        return problems or self._problems_of_parts(job, layout)

    def _problems_of_ends(self, total: int) -> Iterator[Problem]:
        for number, part in enumerate(self.parts[:-1]):
            if part.until is None:
                yield Problem(f"parts.{number}.until", "is missing: every part except the last must set when it ends")
        last = f"parts.{len(self.parts) - 1}.until"
        if self.parts[-1].until is not None:
            yield Problem(last, f"is {self.parts[-1].until}, but the last part ends with the run; leave it out")
        ends = [(f"parts.{n}.until", part.until) for n, part in enumerate(self.parts[:-1]) if part.until is not None]
        # From 0 on, so that the first part has an update too
        for (_, before), (path, until) in pairwise([("", 0), *ends]):
            if until <= before:
                yield Problem(path, f"{until} must be more than {before}, where the part begins")
        for path, until in ends:
            if until >= total:
                message = f"{until} leaves nothing for the next part; train.steps is {total}"
                yield Problem(path, f"{message}; end this part earlier, or drop those after it")

    def _problems_of_parts(self, job: Job, layout: Layout) -> Iterator[Problem]:
        """Yields problems that a part only has in a run of its length: the core reports problems in the whole run."""
        ends = [0, *(part.until or job.train.steps for part in self.parts)]
        for number, (part, (start, end)) in enumerate(zip(self.parts, pairwise(ends), strict=True)):
            short = attrs.evolve(job, train=attrs.evolve(job.train, steps=end - start))
            # Only if it has none in the whole run: one mistake would otherwise be reported twice
            if not list(part.schedule.problems(job, layout)):
                for problem in part.schedule.problems(short, layout):
                    message = f"{problem.message} (in this part, which has {end - start} updates)"
                    yield attrs.evolve(problem.below(f"parts.{number}.schedule"), message=message)
