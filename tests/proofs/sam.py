"""Sharpness-aware minimisation (Foret et al. 2021): follows the gradient of the worst point near the weights.

    [executor]
    type = "./sam.py:SAM"
    radius = 0.05

It leaves running micro-batches to another executor, and so works with every stage but one that brings its own.
"""

from __future__ import annotations

import torch
from attrs import field, frozen
from attrs.validators import gt

from forge_core import ExecutorComponent, default_type
from forge_core.engine.step import global_norm
from forge_kit.nn.recomputing import Recomputing


@frozen(kw_only=True)
class SAM(ExecutorComponent):
    """Goes `radius` along the normalised gradient, takes the gradient there, and comes back to the bit. The step then
    uses that one. It costs a second forward and backward pass; losses and metrics are those of the first."""

    resumes_as = "flag"  # unlike other executors, it changes what is learned

    radius: float = field(default=0.05, validator=gt(0))
    """Length of the way, over all parameters together."""
    inner: ExecutorComponent = default_type("plain")
    """What runs each of the two passes."""

    def build(self, context, model, loss, stages):
        inner = context.build(self.inner, model=model, loss=loss, stages=stages)
        return SharpnessAware(inner, model, stages, context, self.radius)


class SharpnessAware:
    """See `forge_core.contracts.runtime.Executor`."""

    def __init__(self, inner, model, stages, context, radius: float) -> None:
        self._inner, self._model, self._stages = inner, model, stages
        self._context, self._radius = context, radius
        self.evaluate = inner.evaluate

    def train_step(self, batches, denominator):
        devices = [self._context.device] if self._context.device.type == "cuda" else []
        with torch.random.fork_rng(devices):  # the second pass draws the same dropout
            output = self._inner.train_step(batches, denominator)
        self._complete()
        trained = [parameter for parameter in self._model.parameters() if parameter.grad is not None]
        weights = [parameter.detach().clone() for parameter in trained]
        self._move(trained)
        with Recomputing(self._context.auxiliary):  # its metrics count once
            self._inner.train_step(batches, denominator)
        with torch.no_grad():
            for parameter, weight in zip(trained, weights, strict=True):
                parameter.copy_(weight)
        return output

    def _complete(self) -> None:
        """What the engine does after a step: stages add up what they left partial."""
        for stage in reversed(self._stages):
            if hasattr(stage, "complete_gradients"):
                stage.complete_gradients(self._model)

    @torch.no_grad()
    def _move(self, parameters) -> None:
        scale = self._radius / global_norm(parameters).clamp(min=1e-12)
        for parameter in parameters:
            parameter.add_(parameter.grad * scale)
            parameter.grad = None
