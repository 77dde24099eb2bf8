"""The plugin `sdc`."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal

from attrs import define, field
from attrs.validators import ge, lt

from forge_core import Job, Plugin, Problem, TrainingHook, hookimpl
from forge_core.contracts.components import WhenResumed
from forge_plugin_resilience.sdc.faults import CheckedStep, Record

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext, StepContext, TrainContext
    from forge_core.contracts.model import Model
    from forge_core.contracts.runtime import Executor


@define(kw_only=True, slots=False)
class SDC(Plugin):
    """Computes a step again every n steps and compares the gradients, before ranks share them.

    A third computation decides which one was wrong. A fault that does not recur is repaired: the step continues
    with the right gradients, and the curve is the same as in a run without it. The cost is one step in `every`.
    """

    resumes_as: ClassVar[WhenResumed | None] = "safe"

    every: int = field(default=100, validator=ge(1))
    """Steps between checks."""
    tolerance: float = field(default=0.0, validator=[ge(0), lt(1)])
    """Relative difference between the norms of a gradient that is no fault, for devices that do not repeat themselves
    to the bit. 0: gradients must be equal to the bit."""
    on_fault: Literal["stop", "warn"] = "stop"
    """When no two computations of a step agree: end the run with exit code 77, saving nothing; or warn and continue."""

    @cached_property
    def checked(self) -> CheckedStep:
        """The step under way, and the faults found so far."""
        return CheckedStep()

    @hookimpl
    def forge_validate_job(self, job: Job) -> Iterable[Problem]:
        """Requires deterministic kernels or a tolerance where the job names an accelerator."""
        if job.train.device not in ("auto", "cpu"):
            yield from self._not_repeatable(job)

    @hookimpl
    def forge_training_hooks(self, job: Job) -> Iterable[TrainingHook]:
        """Adds `Watch`, by which the executor learns the number of the step."""
        return [Watch(plugin=self)]

    @hookimpl(wrapper=True)
    def forge_build_executor(self, context: BuildContext, model: Model) -> Generator[None, Executor, Executor]:
        """Wraps the executor of the job, whichever component builds it; raises a `JobError` as `forge_validate_job`."""
        from forge_core import JobError
        from forge_plugin_resilience.sdc.check_executor import CheckedExecutor

        # Here too: only now is it known what the device `auto` is.
        if context.device.type != "cpu" and (problems := list(self._not_repeatable(context.job))):
            raise JobError(problems)
        executor = yield
        return CheckedExecutor(self, executor, model, context)

    def _not_repeatable(self, job: Job) -> Iterable[Problem]:
        if not self.tolerance and not job.train.deterministic:
            message = "is 0, but kernels of a GPU do not repeat themselves to the bit"
            yield Problem("plugins.sdc.tolerance", f"{message}; set train.deterministic = true, or a tolerance (1e-3)")


@define(kw_only=True, slots=False)
class Watch(TrainingHook):
    """Tracks the step under way, and keeps the record of checked steps."""

    resumes_as: ClassVar[WhenResumed | None] = "safe"

    plugin: SDC

    def on_train_begin(self, context: TrainContext) -> None:
        """Drop the lines of steps that this start computes again."""
        if record := _record(context):
            record.start(context.step)

    def on_step_begin(self, context: StepContext) -> None:
        """Set the number of the step, and whether it is checked, before the executor computes it."""
        checked = self.plugin.checked
        checked.step, checked.due, checked.digests = context.step, context.step % self.plugin.every == 0, []

    def on_step_end(self, context: StepContext) -> None:
        """Log the faults of a checked step and add its line to the record."""
        from forge_kit.tools.metrics import FAULTY_RANK

        checked = self.plugin.checked
        if checked.due:
            context.log("sdc/faults", len(checked.faults_of_step))
            for fault in checked.faults_of_step:
                context.log(FAULTY_RANK, fault.rank)
            if record := _record(context):
                record.add(checked)
        checked.step, checked.due = 0, False  # an evaluation or a dry run is not checked


def _record(context: TrainContext) -> Record | None:
    from forge_core.parallel.mesh import global_rank

    return Record(context.folder) if context.folder is not None and global_rank() == 0 else None
