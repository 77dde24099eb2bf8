"""Learning rates, and other scalars that follow a schedule: written from the job before each step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch

from forge_core.config.mixture import lr_factor
from forge_core.contracts.components import SchedulerComponent
from forge_core.contracts.errors import ForgeError

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.optimizer import Schedule
    from forge_core.job import Job


class Rates:
    """Writes base rate x schedule x the phase's factor into every parameter group, and each scheduled field of the
    optimizer component into the groups' key of the same name."""

    def __init__(self, job: Job, optimizer: torch.optim.Optimizer, context: BuildContext) -> None:
        self._job = job
        self._total = job.train.steps
        self._groups = optimizer.param_groups
        self._base = [group["lr"] for group in self._groups]
        self._schedule: Schedule = context.build(job.scheduler)
        self._scheduled = {
            field.name: context.build(value)
            for field in attrs.fields(type(job.optimizer))
            if isinstance(value := getattr(job.optimizer, field.name), SchedulerComponent)
        }
        for name in self._scheduled:
            if not any(name in group for group in self._groups):
                raise ForgeError(f"optimizer.{name} is a schedule, but the optimizer has no group with a key {name!r}")

    def factor(self, step: int) -> float:
        """Returns the factor of the learning rate's schedule for the update after `step` completed steps."""
        return self._schedule(step, self._total)

    def apply(self, step: int, tokens: int) -> float:
        """Set every rate for one update.

        The base rates are those of the job and not what the groups hold: a checkpoint restores neither, so that a run
        that continues follows its present job.

        Args:
            step: completed steps.
            tokens: positions fed so far, by which a phase of the data scales the rate.

        Returns:
            The rate of the first group.
        """
        factor = self.factor(step) * lr_factor(self._job, step, tokens)
        for group, base in zip(self._groups, self._base, strict=True):
            group["lr"] = base * factor
            for name, schedule in self._scheduled.items():
                if name in group:
                    group[name] = schedule(step, self._total)
        return self._groups[0]["lr"]
