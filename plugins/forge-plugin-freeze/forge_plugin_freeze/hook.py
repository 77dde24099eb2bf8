"""The training hook that sets what trains, and sees to it that this is what changes."""

from __future__ import annotations

from attrs import define

from forge_core import TrainingHook
from forge_core.contracts.contexts import StepContext
from forge_plugin_freeze.audit import Audit
from forge_plugin_freeze.freeze import Freeze
from forge_plugin_freeze.switch import switch


@define(kw_only=True, slots=False)
class StagedFreezing(TrainingHook):
    """Switches to the stage of each step before it; after the first step of a stage, and of a run, checks the weights.

    Adds `freeze/stage` to the line of that step, and `freeze/changed`, the share of the trained parameters (tensors,
    of this rank) that it changed.
    """

    freeze: Freeze

    def __attrs_post_init__(self) -> None:
        # No fields, which would be state: all of it follows from the step.
        self._stage = -1
        self._audit: Audit | None = None

    def on_step_begin(self, context: StepContext) -> None:
        """Switches before the first step of a stage, and of this process, which may have resumed within one."""
        number = self.freeze.stage_of(context.step)
        if number != self._stage:
            self._stage = number
            switch(context.model, context.optimizer, self.freeze.selection.trained[number])
            self._audit = self._new_audit(context)

    def on_gradients(self, context: StepContext) -> None:
        """Notes the gradients before the update, after which they are gone."""
        if self._audit is not None and self._audit.is_due(context.step):
            self._audit.note_gradients()

    def on_step_end(self, context: StepContext) -> None:
        """Checks the weights. Which steps are checked follows from the step, so all ranks join the collectives."""
        if self._audit is not None and self._audit.is_due(context.step):
            self._audit.look(context)
            if self._audit.done:
                self._audit = None  # with its copies of sums

    def _new_audit(self, context: StepContext) -> Audit:
        number, selection = self._stage, self.freeze.selection
        _, last = self.freeze.steps_of(number, context.job.train.steps)
        until = min(context.step + self.freeze.patience - 1, last) if self.freeze.patience else 0
        return Audit(
            stage=number,
            parts=dict(selection.parts(number)),
            trained=selection.trained[number],
            optimizer=context.optimizer,
            first=context.step,
            until=until,
        )
