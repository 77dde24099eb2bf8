"""The hook `calibration`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

from attrs import define, evolve, field
from attrs.validators import ge

from forge_core.contracts.components import TrainingHook, WhenResumed
from forge_core.contracts.errors import Problem

if TYPE_CHECKING:
    from forge_core.contracts.contexts import CheckpointContext, StepContext, TrainContext
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job
    from forge_plugin_plan.measurements import Measurements


@define(kw_only=True, slots=False)
class Calibration(TrainingHook):
    """Measures the machine at the start of a run, and its steps, for `forge-run plan --calibrate`.

    `calibration.json` in the run folder has the speed of matrix products, memory, launches and collectives, which takes
    some tens of milliseconds on a GPU, and the mean time of a step. Steps are timed by the clock of the host; it waits
    for the device before the first of them and after the last. Losses and weights stay bitwise equal.
    """

    resumes_as: ClassVar[WhenResumed | None] = "safe"

    warmup: int = field(default=3, validator=ge(1))
    """Steps of the process that are not timed: the first few compile, allocate and fill caches."""
    steps: int = field(default=50, validator=ge(1))
    """Steps that are timed, at most."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that steps are comparable: a plan is for batches of one size."""
        if job.train.batch_schedule:
            yield Problem("", "times steps of one size; leave train.batch_schedule out, or this hook")

    def on_train_begin(self, context: TrainContext) -> None:
        from forge_plugin_plan.probes import measure

        self._found: Measurements | None = None
        self._times: list[float] = []
        self._done, self._last, self._paused = 0, 0.0, False
        if context.build is None or context.folder is None:
            return
        build = context.build
        self._found = measure(build.device, build.dtype, build.mesh)
        self._write(context)

    def on_step_end(self, context: StepContext) -> None:
        if self._found is None or len(self._times) >= self.steps:
            return
        self._done += 1
        # What the device still has to do belongs to steps that are not timed
        if self._done == self.warmup:
            _wait(context)
        now = time.perf_counter()
        # Evaluations and checkpoints stand between two steps, so the interval that has one is left out
        if self._done > self.warmup and not self._paused:
            self._times.append(now - self._last)
        self._last, self._paused = now, False
        if len(self._times) == self.steps:
            self._finish(context)

    def on_eval_end(self, context: StepContext, metrics: Mapping[str, float]) -> None:
        self._paused = True

    def on_checkpoint_begin(self, context: TrainContext) -> None:
        self._paused = True

    def on_checkpoint_save(self, context: CheckpointContext) -> None:
        self._paused = True

    def on_train_end(self, context: TrainContext) -> None:
        # Shorter runs have fewer steps, and those that are over within the warm-up none
        if self._found is not None and 0 < len(self._times) < self.steps:
            self._finish(context)

    def _finish(self, context: TrainContext) -> None:
        from forge_plugin_plan.measurements import Step, fingerprint

        # What the device has not done yet belongs to the steps that were timed
        start = time.perf_counter()
        _wait(context)
        seconds = (sum(self._times) + time.perf_counter() - start) / len(self._times)
        assert self._found is not None
        assert context.build is not None
        job = fingerprint(context.job, context.build.layout)
        self._found = evolve(self._found, step=Step(seconds=seconds, steps=len(self._times), job=job))
        self._write(context)

    def _write(self, context: TrainContext) -> None:
        from forge_core.parallel.mesh import global_rank
        from forge_plugin_plan.measurements import FILE

        assert self._found is not None
        # Every rank has measured, since collectives take all; one file is enough
        if global_rank() == 0 and context.folder is not None:
            self._found.write(context.folder / FILE)


def _wait(context: TrainContext) -> None:
    from forge_plugin_plan.devices import wait_for

    assert context.build is not None
    wait_for(context.build.device)
