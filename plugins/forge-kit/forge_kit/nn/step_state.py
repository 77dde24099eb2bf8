"""State that forward and backward passes change, put back so that a step can be computed again."""

from __future__ import annotations

import torch
from torch import nn

from forge_core.devices import query_device


class StepState:
    """Generators and buffers as they were before a step, and no gradients."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self._generator = torch.get_rng_state()
        self._device_generator = query_device(device, "get_rng_state")
        # A forward pass may change buffers, such as running statistics, as it advances the generators
        self._buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    @torch.no_grad()
    def restore(self) -> None:
        """Put them back, so that a step is computed as if for the first time."""
        torch.set_rng_state(self._generator)
        if self._device_generator is not None:
            torch.get_device_module(self._device).set_rng_state(self._device_generator, self._device)
        for name, buffer in self._model.named_buffers():
            buffer.copy_(self._buffers[name])
        for parameter in self._model.parameters():
            parameter.grad = None
