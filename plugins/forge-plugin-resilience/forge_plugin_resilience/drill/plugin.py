"""The plugin `drill`: the part of a drill that is inside each rank."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import define, field
from attrs.validators import ge, gt, in_

from forge_core.contracts.components import FilePath, Plugin, TrainingHook, WhenResumed
from forge_core.contracts.hookspecs import hookimpl
from forge_plugin_resilience.drill.faults import FAULTS
from forge_plugin_resilience.drill.injection import Injection
from forge_plugin_resilience.drill.records import Event

if TYPE_CHECKING:
    from forge_core.contracts.contexts import CheckpointContext, StepContext, TrainContext
    from forge_core.contracts.runtime import LossFunction, Storage
    from forge_core.job import Job


@define(kw_only=True, slots=False)
class Drill(Plugin):
    """Injects one fault, once, and ends the run early. `forge-run doctor drill` writes its table; no job needs it.

    A run that is started again, with the same job, finds in `folder` that the fault has been injected, and trains on.
    """

    resumes_as: ClassVar[WhenResumed | None] = "safe"

    folder: FilePath
    """Folder for the record of steps and of the injection."""
    steps: int = field(validator=gt(0))
    """Step after which the run ends for good: schedules go by `train.steps`, which stays as it is."""
    fault: str = field(default="", validator=in_(("", *FAULTS)))
    """Name of the fault; empty for none."""
    step: int = field(default=1, validator=gt(0))
    """Step in which it is injected."""
    rank: int = field(default=0, validator=ge(0))
    """Rank that it hits."""

    def __attrs_post_init__(self) -> None:
        self._injection = Injection(self.folder, self.steps, self.fault, self.step, self.rank)

    @hookimpl
    def forge_training_hooks(self, job: Job) -> Iterable[TrainingHook]:
        """Also starts the reports of progress that keep limits on hangs from ending ranks before the fault is due."""
        self._injection.hold_limits()
        return [DrillSteps(self._injection)]

    @hookimpl(wrapper=True)
    def forge_build_loss(self) -> Generator[None, LossFunction, LossFunction]:
        """Wraps the loss of the job, whichever component builds it, if the fault acts in it."""
        return self._injection.around_loss((yield))

    @hookimpl(wrapper=True)
    def forge_build_storage(self) -> Generator[None, Storage, Storage]:
        """Changes the storage in place: a wrapper around it would be no `SpreadStorage` for the engine."""
        storage = yield
        self._injection.watch_storage(storage)
        return storage


class DrillSteps(TrainingHook):
    """Passes events of the run on to the injection; without state, so that no checkpoint has anything of it."""

    resumes_as: ClassVar[WhenResumed | None] = "safe"

    def __init__(self, injection: Injection) -> None:
        self._injection = injection

    def on_train_begin(self, context: TrainContext) -> None:
        """Arm the fault, unless the folder has a record that it has happened."""
        self._injection.begin(context)

    def on_step_begin(self, context: StepContext) -> None:
        self._injection.step_begins(context)

    def on_gradients(self, context: StepContext) -> None:
        self._injection.gradients_are_there(context)

    def on_step_end(self, context: StepContext) -> None:
        """Record the step and call the fault; after the last step of the drill, request the end of the run."""
        self._injection.step_ends(context)

    def on_checkpoint_begin(self, context: TrainContext) -> None:
        """Record that a save begins: one without a later record `saved` has failed."""
        self._injection.note(Event.SAVE, context.step)

    def on_checkpoint_save(self, context: CheckpointContext) -> None:
        """Record a committed checkpoint, which may be of an earlier step (`async_save`)."""
        self._injection.note(Event.SAVED, context.step)

    def on_rollback(self, context: TrainContext, step: int, reason: str) -> None:
        """Record the step at which the run went back, and the step of the state that it has now."""
        self._injection.note(Event.ROLL_BACK, context.step, to=step)

    def on_train_end(self, context: TrainContext) -> None:
        self._injection.training_ends(context)

    def state_dict(self) -> dict[str, Any]:
        return {}
