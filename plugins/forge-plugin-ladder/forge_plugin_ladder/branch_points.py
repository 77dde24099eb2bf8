"""The hook `branch_points`: saves a trunk where other runs begin."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from attrs import define, field
from attrs.validators import deep_iterable, gt, min_len

from forge_core.contracts.components import TrainingHook
from forge_core.contracts.errors import Problem

if TYPE_CHECKING:
    from forge_core.contracts.contexts import StepContext
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job


@define(kw_only=True, slots=False)
class BranchPoints(TrainingHook):
    """Saves after given steps, so that shorter runs continue from there with their own decay."""

    # Saves change no number of the training
    resumes_as = "safe"

    steps: tuple[int, ...] = field(validator=[min_len(1), deep_iterable(gt(0))])
    """Steps after which to save."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Refuses steps that the run does not reach, and a retention that would delete their checkpoints."""
        if late := [step for step in self.steps if step > job.train.last_step]:
            yield Problem("steps", f"{late[0]:,} is behind the last step, {job.train.last_step:,}")
        if job.checkpoint.keep:
            yield Problem(
                "steps", f"checkpoint.keep = {job.checkpoint.keep} would delete their checkpoints; set it to 0"
            )

    def on_step_end(self, context: StepContext) -> None:
        """Request a save after each of the steps."""
        if context.step in self.steps:
            context.request_checkpoint()
