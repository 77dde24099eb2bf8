"""The hook `slurm`: stops a run in time, and notes for the batch script how far it has come."""

from __future__ import annotations

import os
import time
import warnings
from collections import deque
from typing import TYPE_CHECKING, Any

from attrs import define, field
from attrs.validators import ge

from forge_core.contracts.components import TrainingHook
from forge_core.contracts.run_end import Cause

if TYPE_CHECKING:
    from pathlib import Path

    from forge_core.contracts.contexts import CheckpointContext, StepContext, TrainContext

LEAST_MARGIN_S = 60.0
RECENT = 50
"""Steps of which the slowest counts: an early one that compiled does not count for ever."""


@define(kw_only=True, slots=False)
class Slurm(TrainingHook):
    """Stops and saves before the time limit of the SLURM job, which `forge-run submit` then queues again.

    Also records the step and the newest checkpoint in the run folder, from which the batch script determines whether a
    failed run has made progress. Outside SLURM, it only issues a warning.
    """

    resumes_as = "safe"
    rolls_back = False  # how long a save takes is no matter of the weights

    margin_s: float = field(default=0.0, validator=ge(0))
    """Seconds before the end of the allocation at which to stop. 0: twice the slowest save of this run so far, with the
    evaluation before it, and two steps; at least 60."""
    slowest_save_s: float = field(default=0.0, init=False)

    def on_train_begin(self, context: TrainContext) -> None:
        """Ask SLURM for the end of the allocation, on rank 0, and write the first record of progress."""
        from forge_core.parallel.mesh import global_rank
        from forge_plugin_launch.slurm.scheduler import own_job

        self._job = own_job(os.environ)
        self._restart = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        self._rank = global_rank()
        self._steps: deque[float] = deque(maxlen=RECENT)
        self._ends: dict[int, float] = {}  # when each step ended that no checkpoint holds yet
        self._began_step, self._saved = context.step, context.step
        self._last: float | None = None
        self._end: float | None = None
        if self._rank != 0:
            return
        if not self._job:
            warnings.warn("the hook slurm does nothing: this is no SLURM job (SLURM_JOB_ID is not set)", stacklevel=2)
            return
        self._end = self._ask_end(warn=True)
        self._note(context)

    def on_step_begin(self, context: StepContext) -> None:
        now = time.monotonic()
        if self._last is not None:  # from step to step, so that what comes in between counts
            self._steps.append(now - self._last)
        self._last = now

    def on_step_end(self, context: StepContext) -> None:
        """Request a stop if the end is near, after SLURM was asked again."""
        now = time.monotonic()
        self._ends[context.step] = now
        if self._end is None or now + self.margin < self._end:
            return
        self._end = self._ask_end(warn=False)  # the limit may have been raised meanwhile
        if self._end is not None and now + self.margin >= self._end:
            left = max(0, round(self._end - now))
            context.request_stop(f"time limit: SLURM job {self._job} ends in {left} s", cause=Cause.TIME)

    @property
    def margin(self) -> float:
        """Seconds before the end of the allocation at which this rank requests a stop."""
        if self.margin_s:
            return self.margin_s
        return max(LEAST_MARGIN_S, 2 * self.slowest_save_s + 2 * max(self._steps, default=0.0))

    def on_checkpoint_save(self, context: CheckpointContext) -> None:
        """Measure the save, and record the step as the newest checkpoint."""
        # From the end of the saved step to the commit, so that a save in the background counts as long as it takes
        if context.step in self._ends:
            self.slowest_save_s = max(self.slowest_save_s, time.monotonic() - self._ends[context.step])
        self._ends = {step: ended for step, ended in self._ends.items() if step > context.step}
        self._saved = context.step
        self._last = None  # the time of the save is no time of a step
        if self._rank == 0 and self._job:
            self._note(context)

    def on_train_end(self, context: TrainContext) -> None:
        if self._rank == 0 and self._job:
            self._note(context, ended=context.step)

    def _note(self, context: TrainContext, **more: Any) -> None:
        from forge_plugin_launch.slurm.records import PROGRESS, write_json

        if context.folder is None:
            return
        facts = {"job": self._job, "restart": self._restart, "began": self._began_step, "saved": self._saved}
        facts["steps"] = context.job.train.steps
        write_json(self._folder(context) / PROGRESS, facts | {"slowest_save_s": self.slowest_save_s} | more)

    def _folder(self, context: TrainContext) -> Path:
        from forge_plugin_launch.slurm.records import FOLDER

        assert context.folder is not None
        folder = context.folder / FOLDER
        folder.mkdir(exist_ok=True)
        return folder

    def _ask_end(self, warn: bool) -> float | None:
        """The end of the allocation on the monotonic clock; None if it has none, or if it is unknown."""
        from forge_plugin_launch.slurm.scheduler import SlurmError, seconds_left

        try:
            left = seconds_left(self._job)  # time left and not time of day: clocks of nodes differ
        except SlurmError as error:
            end = os.environ.get("SLURM_JOB_END_TIME", "")
            if end.isdecimal():
                # The second choice only: it was set when the job began, so that a raised limit is not in it
                return time.monotonic() + int(end) - time.time()
            if warn:
                hint = "the run cannot stop before its time limit; set SLURM_JOB_END_TIME, or sbatch --signal=USR1@300"
                warnings.warn(f"hooks.slurm: {error}; {hint}", stacklevel=2)
            return self._end
        return None if left is None else time.monotonic() + left
