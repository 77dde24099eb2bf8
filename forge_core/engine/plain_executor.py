"""What the component `plain` builds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forge_core.contracts.runtime import StepOutput
from forge_core.parallel.stages import around

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Model
    from forge_core.contracts.runtime import LossFunction, LossOutput, ParallelStage


class PlainExecutor:
    """See `forge_core.contracts.runtime.Executor`."""

    def __init__(self, model: Model, loss: LossFunction, stages: Sequence[ParallelStage] = ()) -> None:
        self._model = model
        self._loss = loss
        self._stages = stages

    def train_step(self, batches: Sequence[Batch], denominator: Tensor) -> StepOutput:
        outputs = []
        for number, batch in enumerate(batches, 1):
            with around(self._stages, self._model, backward=True, last=number == len(batches)):
                output = self._forward(batch, self._loss)
                (output.sum / denominator).backward()
            outputs.append(output._replace(sum=output.sum.detach()))
        return combine(outputs)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch], measure: LossFunction | None = None) -> StepOutput:
        outputs = []
        for number, batch in enumerate(batches, 1):
            with around(self._stages, self._model, backward=False, last=number == len(batches)):
                outputs.append(self._forward(batch, measure or self._loss))
        return combine(outputs)

    def _forward(self, batch: Batch, loss: LossFunction) -> LossOutput:
        return loss(self._model.head, self._model(batch), batch)


def combine(outputs: Sequence[LossOutput]) -> StepOutput:
    """The outputs of several micro-batches as one. The loss sum is that of the plain loss, `per_sequence`: what else an
    objective contains (z-loss, smoothing) is trained on but not reported as the loss."""
    sums = torch.cat([output.per_sequence[0] for output in outputs])
    counts = torch.cat([output.per_sequence[1] for output in outputs])
    return StepOutput(sums.sum(), counts.sum(), (sums, counts))
