"""Starts the weights of modalities as copies of the text's."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from attrs import define

from forge_core.contracts.components import TrainingHook

if TYPE_CHECKING:
    from forge_core.contracts.contexts import CheckpointContext, TrainContext
    from forge_core.job import Job


@define(kw_only=True, slots=False)
class WarmStart(TrainingHook):
    """Copies the text's weights to each modality before the first step of a new run.

    Copies what `[checkpoint.load]` has loaded by then, else initial values. What it has loaded for a modality stays.
    """

    # A hook, since initial values and `[checkpoint.load]` both come after a model is built. Not a field: that would be
    # state, which a continued run would have to find in its checkpoint.
    continues = False

    def on_checkpoint_load(self, context: CheckpointContext) -> None:
        """Records that the run continues, so that restored weights are not replaced."""
        self.continues = True

    def on_train_begin(self, context: TrainContext) -> None:
        """Copies the text's weights in a new run, except to weights that `[checkpoint.load]` has loaded."""
        if not self.continues:
            copy_text(context.model, loaded_names(context.job))


def copy_text(model: Any, but: Collection[str] = ()) -> None:
    """Copy the text's parameters and buffers to their counterparts of each modality, except to the names in `but`.

    Each rank copies its own part: a copy is split as its original is, whatever the layout.
    """
    import torch

    # They share the model's memory; copying a DTensor copies its local part.
    tensors = model.state_dict()
    with torch.no_grad():
        for name, source in model.text_names(tensors).items():
            if name not in but:
                tensors[name].copy_(tensors[source])


def loaded_names(job: Job) -> set[str]:
    """Returns names of the parameters and buffers that `[checkpoint.load]` has loaded."""
    return {name for component in job.checkpoint.loads.values() for name in component.names()}
