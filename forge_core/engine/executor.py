"""Executors of the core: micro-batches one after the other, and the part of each that is this rank's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import TYPE_CHECKING

from attrs import field, frozen

from forge_core.contracts.components import ExecutorComponent
from forge_core.contracts.runtime import Executor, LossFunction, LossOutput, ParallelStage, StepOutput
from forge_core.parallel.stages import around

if TYPE_CHECKING:
    from torch import Tensor

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Model


@frozen(kw_only=True)
class Plain(ExecutorComponent):
    """Forward and backward of one micro-batch after the other."""

    def build(
        self, context: BuildContext, model: Model, loss: LossFunction, stages: Sequence[ParallelStage]
    ) -> Executor:
        return PlainExecutor(model, loss, stages)


@frozen(kw_only=True)
class Brought(ExecutorComponent):
    """The executor that a stage brings."""

    executor: Executor = field(repr=False)

    def build(
        self, context: BuildContext, model: Model, loss: LossFunction, stages: Sequence[ParallelStage]
    ) -> Executor:
        return self.executor


class PlainExecutor:
    """Runs micro-batches one after the other; see `forge_core.contracts.runtime.Executor`."""

    def __init__(self, model: Model, loss: LossFunction, stages: Sequence[ParallelStage] = ()) -> None:
        self._model, self._loss, self._stages = model, loss, stages

    def train_step(self, batches: Sequence[Batch], denominator: Tensor) -> StepOutput:
        """Each backward pass follows its forward pass: activations of one micro-batch are held at a time."""
        return self._run(batches, self._loss, denominator)

    def evaluate(self, batches: Sequence[Batch], measure: LossFunction | None = None) -> StepOutput:
        import torch

        with torch.no_grad():
            return self._run(batches, measure or self._loss)

    def _run(self, batches: Sequence[Batch], loss: LossFunction, denominator: Tensor | None = None) -> StepOutput:
        """Forward passes, with a backward pass after each if there is a `denominator` of the loss sums."""
        outputs = []
        for number, batch in enumerate(batches, 1):
            # The context spans the backward pass, because recomputation and the reduction of gradients happen there.
            with around(self._stages, self._model, backward=denominator is not None, last=number == len(batches)):
                output = loss(self._model.head, self._model(batch), batch)
                if denominator is not None:
                    (output.sum / denominator).backward()
            outputs.append(output._replace(sum=output.sum.detach()))  # else the graph of every micro-batch lives on
        return combine(outputs)


class SplittingExecutor:
    """Passes this rank's part of each micro-batch, made by `splits` in order, to another executor."""

    def __init__(self, executor: Executor, splits: Sequence[Callable[[Batch], Batch]]) -> None:
        self._executor, self._splits = executor, splits

    def train_step(self, batches: Sequence[Batch], denominator: Tensor) -> StepOutput:
        return self._executor.train_step([self._split(batch) for batch in batches], denominator)

    def evaluate(self, batches: Sequence[Batch], measure: LossFunction | None = None) -> StepOutput:
        return self._executor.evaluate([self._split(batch) for batch in batches], measure)

    def _split(self, batch: Batch) -> Batch:
        return reduce(lambda part, split: split(part), self._splits, batch)


def combine(outputs: Sequence[LossOutput]) -> StepOutput:
    """Joins the sums and counts of several micro-batches.

    The loss sum contains only the plain loss, `per_sequence`: other terms of an objective (z-loss, label smoothing) are
    trained on but not reported as the loss.
    """
    import torch

    sums = torch.cat([output.per_sequence[0] for output in outputs])
    counts = torch.cat([output.per_sequence[1] for output in outputs])
    return StepOutput(sums.sum(), counts.sum(), (sums, counts))
