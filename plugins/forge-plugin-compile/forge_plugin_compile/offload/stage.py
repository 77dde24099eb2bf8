"""The stage of the component `activation_offload`: wraps blocks so that what they save moves to the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge_core.contracts.runtime import ParallelStage
from forge_kit.nn.blocks import blocks_of
from forge_plugin_compile.offload.saved_tensors import Mover, Offloaded

if TYPE_CHECKING:
    import torch

    from forge_core.contracts.model import Model
    from forge_plugin_compile.offload.activation_offload import ActivationOffload


class OffloadStage(ParallelStage):
    """See `forge_core.contracts.runtime.ParallelStage`."""

    def __init__(self, component: ActivationOffload, device: torch.device) -> None:
        self._component = component
        self._device = device

    def apply(self, model: Model) -> Model:
        """Wrap the forward pass of blocks, in place: no module is added, so no name changes."""
        mover = Mover(self._device, int(self._component.min_mb * 1e6))
        for number, block in enumerate(blocks_of(model)):
            if number % self._component.every == 0:
                block.forward = Offloaded(block.forward, mover, block)
        return model

    def describe(self) -> str:
        """Returns where activations wait, and the blocks."""
        every = self._component.every
        where = "pinned memory of the host" if self._device.type != "cpu" else "copies: a CPU has no other memory"
        return f"activations in {where}" + (f"; blocks 0, {every}, {2 * every}, … only" if every > 1 else "")
