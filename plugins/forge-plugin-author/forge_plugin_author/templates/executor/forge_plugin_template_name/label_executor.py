"""An executor that labels micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.profiler import record_function

from forge_core.engine.executor import combine
from forge_core.parallel.stages import around

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Model
    from forge_core.contracts.runtime import LossFunction, LossOutput, ParallelStage, StepOutput


class LabelledExecutor:
    """See `forge_core.contracts.runtime.Executor`."""

    def __init__(self, model: Model, loss: LossFunction, stages: Sequence[ParallelStage], label: str) -> None:
        self._model, self._loss, self._stages, self._label = model, loss, stages, label

    def train_step(self, batches: Sequence[Batch], denominator: Tensor) -> StepOutput:
        """Run forward and backward of each; sums are divided by the tokens of the global batch, so gradients add up."""
        outputs = []
        for number, batch in enumerate(batches, 1):
            with around(self._stages, self._model, backward=True, last=number == len(batches)):
                output = self._forward(batch, number, self._loss)
                with record_function(f"{self._label} {number} backward"):
                    (output.sum / denominator).backward()
            outputs.append(output._replace(sum=output.sum.detach()))
        return combine(outputs)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch], measure: LossFunction | None = None) -> StepOutput:
        """Run forward of each, with the loss or another measure."""
        outputs = []
        for number, batch in enumerate(batches, 1):
            with around(self._stages, self._model, backward=False, last=number == len(batches)):
                outputs.append(self._forward(batch, number, measure or self._loss))
        return combine(outputs)

    def _forward(self, batch: Batch, number: int, loss: LossFunction) -> LossOutput:
        with record_function(f"{self._label} {number} forward"):
            return loss(self._model.head, self._model(batch), batch)
