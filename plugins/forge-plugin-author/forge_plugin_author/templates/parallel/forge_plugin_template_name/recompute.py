"""The stage that the component builds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch.utils.checkpoint import checkpoint

from forge_core.contracts.runtime import ParallelStage
from forge_kit.nn.recomputing import Recomputing

if TYPE_CHECKING:
    from forge_core.auxiliary import Auxiliary
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Carry, Model


class RecomputeStage(ParallelStage):
    """Adds no module, so that parameters keep their names."""

    def __init__(self, every: int, auxiliary: Auxiliary) -> None:
        self._every, self._auxiliary = every, auxiliary
        self._changed = 0

    def apply(self, model: Model) -> Model:
        """Replace the forward pass of every n-th layer by one that is recomputed."""
        for number, layer in enumerate(model.layers.values()):
            if number % self._every == 0:
                layer.forward = self._recomputed(layer.forward)
                self._changed += 1
        return model

    def describe(self) -> str:
        """Returns the line of the run's summary."""
        return f"{self._changed} layers are recomputed"

    def _recomputed(self, forward: Callable[[Carry, Batch], Carry]) -> Callable[[Carry, Batch], Carry]:
        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), Recomputing(self._auxiliary)  # metrics must not count a layer twice

        def run(carry: Carry, batch: Batch) -> Carry:
            if not torch.is_grad_enabled():
                return forward(carry, batch)
            again: Carry = checkpoint(forward, carry, batch, use_reentrant=False, context_fn=contexts)
            return again

        return run
