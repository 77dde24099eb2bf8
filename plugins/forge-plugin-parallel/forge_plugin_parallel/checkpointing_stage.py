"""The stage of the component `activation_checkpointing`: wraps blocks so that they are recomputed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge_core.contracts.errors import JobError, Problem
from forge_core.contracts.runtime import ParallelStage
from forge_kit.nn.blocks import blocks_of
from forge_plugin_parallel.activation_checkpointing import FAILS_IN_TORCH, fails_in_torch
from forge_plugin_parallel.recomputation import Checkpointed, Contexts

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.model import Model
    from forge_plugin_parallel.activation_checkpointing import ActivationCheckpointing


class CheckpointingStage(ParallelStage):
    """See `forge_core.contracts.runtime.ParallelStage`."""

    def __init__(self, component: ActivationCheckpointing, context: BuildContext) -> None:
        self._component = component
        self._context = context
        self._described: str = component.mode

    def apply(self, model: Model) -> Model:
        """Wrap the forward pass of blocks, in place: no module is added, so no name changes."""
        mode: str = self._component.mode
        if mode == "auto":
            # The stages that split the model precede this one, so sizes are this rank's; fsdp follows, as an estimate.
            from forge_plugin_parallel.memory_budget import Budget

            budget = Budget.of(model, self._component, self._context)
            mode, self._described = budget.mode, f"auto: {budget}"
            if mode == "full" and fails_in_torch(self._context.job, self._context.layout):
                raise JobError([Problem("parallel.activation_checkpointing.mode", f"auto takes {FAILS_IN_TORCH}")])
        if mode != "none":
            contexts = Contexts.of(mode, self._context)
            # Numbered on each rank from 0, over its own layers and then its further blocks
            for number, block in enumerate(blocks_of(model)):
                if number % self._component.every == 0:
                    block.forward = Checkpointed.of(block, contexts)
        return model

    def describe(self) -> str:
        """Returns the mode and the blocks it applies to; for auto, with the figures of the estimate."""
        every = self._component.every
        return self._described + (f"; blocks 0, {every}, {2 * every}, … only" if every > 1 else "")
