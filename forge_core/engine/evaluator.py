"""Running the evaluations of a job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge_core.contracts.contexts import EvaluationContext
from forge_core.contracts.errors import ForgeError
from forge_core.contracts.optimizer import HasEvaluationWeights
from forge_core.data.held_out import evaluation_batches
from forge_core.parallel.mesh import all_reduce_tokens

if TYPE_CHECKING:
    from forge_core.contracts.components import EvaluationComponent
    from forge_core.contracts.data import Batch, Dataset
    from forge_core.contracts.model import Model
    from forge_core.engine.build import Run


class Evaluator:
    """Measures the model of a run by `[evaluations]`. Collective."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def due(self, step: int) -> bool:
        """Whether the number of a step asks for an evaluation."""
        interval = self._run.job.eval.interval
        return bool(interval) and step % interval == 0

    def __call__(self, step: int) -> dict[str, float]:
        """The metrics of all evaluations, by the names under which they are logged.

        Raises:
            ForgeError: a metric is not a number; names the evaluation.
        """
        metrics: dict[str, float] = {}
        with evaluation_mode(self._run.model, self._run.optimizer):
            for name, evaluation in self._run.job.evaluations.items():
                metrics |= self._measure(f"evaluations.{name}", evaluation, step)
        return metrics

    def _measure(self, name: str, evaluation: EvaluationComponent, step: int) -> dict[str, float]:
        try:
            return numbers(evaluation.evaluate(self._context(step)))
        except Exception as error:
            error.add_note(f"in {name} ({self._run.context.type_of(evaluation)})")
            raise

    def _context(self, step: int) -> EvaluationContext:
        run = self._run
        return EvaluationContext(
            job=run.job,
            build=run.context,
            step=step,
            model=run.model,
            executor=run.executor,
            held_out=run.held_out,
            draw=self._batches,
            sum_over_tokens=lambda tensor: all_reduce_tokens(tensor, run.context.mesh),
        )

    def _batches(self, dataset: Dataset, count: int) -> Iterator[Batch]:
        for number, batch in enumerate(evaluation_batches(dataset, count, self._run.job, self._run.context), 1):
            self._run.hooks.beacon.enter(f"evaluation, batch {number}")
            yield batch


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics as numbers of Python: loggers and checkpoints take no others. A scalar tensor is waited for.

    Raises:
        ForgeError: one is no number; names it.
    """
    plain: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            plain[name] = value if isinstance(value, int | float) else float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r}"
            raise ForgeError(f"the metric {name!r} is {kind}; return a number or a scalar tensor") from error
    return plain


@contextmanager
def evaluation_mode(model: Model, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Model and optimizer in evaluation mode, without gradients. Most optimizers have no modes: they evaluate the
    weights that they train."""
    modes: list[Any] = [model, *([optimizer] if isinstance(optimizer, HasEvaluationWeights) else [])]
    for each in modes:
        each.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for each in reversed(modes):
            each.train()
