"""Micro-batches of which each rank has a part of the sequences only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

from torch import Tensor

from forge_core.contracts.data import Batch
from forge_core.contracts.runtime import Executor, LossFunction, StepOutput


class SplittingExecutor:
    """See `forge_core.contracts.runtime.Executor`. Passes this rank's part of each micro-batch to another executor; its
    callers see whole ones.

    Args:
        splits: what makes the part, in order; first of all, what the model adds while sequences are whole.
    """

    def __init__(self, executor: Executor, splits: Sequence[Callable[[Batch], Batch]]) -> None:
        self._executor, self._splits = executor, splits

    def train_step(self, batches: Sequence[Batch], denominator: Tensor) -> StepOutput:
        return self._executor.train_step([self._split(batch) for batch in batches], denominator)

    def evaluate(self, batches: Sequence[Batch], measure: LossFunction | None = None) -> StepOutput:
        return self._executor.evaluate([self._split(batch) for batch in batches], measure)

    def _split(self, batch: Batch) -> Batch:
        return reduce(lambda part, split: split(part), self._splits, batch)
