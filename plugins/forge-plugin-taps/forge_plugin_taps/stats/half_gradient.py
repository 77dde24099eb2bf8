"""The executor around another one that first computes the gradient of half of the sequences.

Shapes: B sequences of a micro-batch, S positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forge_core.contracts.data import IGNORED_LABEL, Batch
from forge_core.parallel.mesh import all_reduce_tokens, sample_rank
from forge_kit.nn.recomputing import Recomputing
from forge_kit.nn.step_state import StepState
from forge_plugin_taps.stats.tensor_norms import TensorNorms

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.model import Model
    from forge_core.contracts.runtime import Executor, LossFunction, ParallelStage, StepOutput


class HalfGradient:
    """See `forge_core.contracts.runtime.Executor`. All ranks compute the half in the same steps."""

    def __init__(self, inner: Executor, model: Model, context: BuildContext, stages: Sequence[ParallelStage]) -> None:
        self._inner, self._model, self._context, self._stages = inner, model, context, stages
        self._rank = sample_rank(context.mesh, context.layout)
        self._norms: TensorNorms | None = None
        self.due = False
        """Whether the next training step is sampled."""
        self.square: Tensor | None = None
        """() squared norm of the half's gradient, in a sampled step."""
        self.tokens = self.all_tokens = torch.zeros(())
        """() tokens with a label in the half and in the whole global batch."""

    def begin(self) -> None:
        """Agree on the parts of parameters, before the first step. Collective."""
        self._norms = TensorNorms(self._model, self._context.device, "role")

    def evaluate(self, batches: Sequence[Batch], measure: LossFunction | None = None) -> StepOutput:
        """Evaluates by the inner executor."""
        return self._inner.evaluate(batches, measure)

    def train_step(self, batches: Sequence[Batch], denominator: Tensor) -> StepOutput:
        """Compute a step, and before it the norm of the half's gradient if it is due. Collective then."""
        # The dry run comes before `begin`, and is never sampled
        if self.due and self._norms is not None:
            self._measure(self._norms, batches, denominator)
        return self._inner.train_step(batches, denominator)

    def _measure(self, norms: TensorNorms, batches: Sequence[Batch], denominator: Tensor) -> None:
        before, halves = StepState(self._model, self._context.device), list(self._masked(batches))
        counts = torch.stack([(batch["labels"] != IGNORED_LABEL).sum() for batch in halves])
        tokens = all_reduce_tokens(counts.sum().double(), self._context.mesh)
        # Metrics of modules count in the pass that trains, and not here
        with Recomputing(self._context.auxiliary):
            # Clamped as the run loop's: a half without any label has gradients of 0, and not of NaN
            self._inner.train_step(halves, tokens.clamp(min=1).to(denominator.dtype))
        # As the run loop completes the gradients of a step: the last stage first
        for stage in reversed(self._stages):
            stage.complete_gradients(self._model)
        norm = norms.over_ranks([norms.squares(norms.gradients())])[0, -1]
        self.square, self.tokens, self.all_tokens = norm.square(), tokens, denominator.double()
        # Before the step itself, so that no second gradient is held while it computes
        before.restore()

    def _masked(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        """The micro-batches without the labels of rows whose number in the global batch is odd."""
        # From the batches, as a schedule may give each step another size
        first = self._rank * sum(len(batch["labels"]) for batch in batches)
        for batch in batches:
            labels = batch["labels"]
            rows = torch.arange(first, first + len(labels), device=labels.device)
            first += len(labels)
            # Rows that were divided by cost have their numbers with them
            odd = batch.get("slots", rows) % 2 == 1
            yield {**batch, "labels": labels.masked_fill(odd.unsqueeze(1), IGNORED_LABEL)}
