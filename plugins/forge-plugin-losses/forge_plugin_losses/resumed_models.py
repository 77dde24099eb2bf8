"""A hook for losses that compare with another run's model: a continued run has the same one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from attrs import define, field

from forge_core.contracts.components import FilePath, TrainingHook
from forge_core.contracts.errors import CheckpointError


@define(kw_only=True, slots=False)
class SameTrained(TrainingHook):
    """Refuses to continue a run with another checkpoint of a trained model than it had before.

    A run folder that names the model may have newer checkpoints since. Derive, and add a path by the name `key`.
    """

    resumes_as = "safe"
    key: ClassVar[str]
    """Key of `[loss]` that names the model, and of the hook's own field with the same path."""

    checkpoint: str = field(init=False, default="")

    def on_train_begin(self, context: Any) -> None:
        """Compares the checkpoint that the path names now with the one of the run so far.

        Raises:
            CheckpointError: they differ.
        """
        from forge_plugin_losses.teacher import find_trained

        # Called after the state was loaded, if the run continues
        path = getattr(self, self.key)
        current = str(find_trained(Path(path))[0])
        before, self.checkpoint = self.checkpoint, current
        if before and before != current:
            hint = f'name it in the job, loss.{self.key} = "{before}", and continue with --resume-with-changes'
            message = f"the {self.key} {path} was {before} when this run began, and is {current} now"
            raise CheckpointError(f"{message}; {hint}")

    def state_dict(self) -> dict[str, Any]:
        """Returns the path as the job has it, and the checkpoint that was found there."""
        return {self.key: getattr(self, self.key), "checkpoint": self.checkpoint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Ignores the state if the job names another path: that change is intended."""
        if state[self.key] == getattr(self, self.key):
            self.checkpoint = state["checkpoint"]


@define(kw_only=True, slots=False)
class SameReference(SameTrained):
    """Refuses to continue a run with another checkpoint of the reference than it had before."""

    key = "reference"

    reference: FilePath
