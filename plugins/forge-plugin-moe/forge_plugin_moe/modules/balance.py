"""Auxiliary losses for the load balance of experts.

Shapes: B sequences, S positions of this rank, E experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from forge_plugin_moe.modules.sequences import Sequences, tally

if TYPE_CHECKING:
    from forge_core.auxiliary import Unit
    from forge_core.contracts.contexts import BuildContext
    from forge_plugin_moe.moe import BalancedRouter

CHOSEN = "moe/chosen"
"""Count of the tokens that chose each expert."""


def set_means(values: Tensor, sets: Sequence[int]) -> Tensor:
    """Returns (…, E), for each expert the mean of the values of its set; `sets` are their sizes, in order."""
    parts = values.split(list(sets), -1)
    return torch.cat([part.mean(-1, keepdim=True).expand_as(part) for part in parts], -1)


class Balance(nn.Module):
    """Σ f P in three forms; see `forge_plugin_moe.moe.BalancedRouter`.

    Only P has gradients, and all three are linear in it: so the parts of a sequence on different ranks add up.

    With several sets of experts, f is relative to the mean of an expert's set. Tokens that choose among one set have
    scores of 0 in the others, so that the sum is Σ f P within each set, weighted by its share of the tokens.

    Buffers: `load` (E,), the last step's counts of the whole batch, if a loss needs them.

    Args:
        component: the keys.
        context: of the router.
        experts: E.
        counted: whether choices are counted even if no loss needs it.
        sets: sizes of the sets of consecutive experts that are balanced each by itself; by default there is one.
    """

    load: Tensor

    def __init__(
        self,
        component: BalancedRouter,
        context: BuildContext,
        experts: int,
        counted: bool,
        sets: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.sets = tuple(sets) or (experts,)
        self._component = component
        self._auxiliary, self._layer = context.auxiliary, context.layer or 0
        self._sequences = Sequences.of(context)
        self._share = 1 / context.layout.tp  # tensor-parallel ranks all compute this, and their gradients are summed
        self._experts = experts
        self._counted = counted or component.batch_balance > 0
        self._chosen = context.auxiliary.counter(CHOSEN, self._layer)
        if component.batch_balance:
            # float32 has whole numbers up to 2^24 only, and a batch may have more choices
            self.register_buffer("load", torch.empty(experts, dtype=torch.float64))

    def init_buffers(self, device: torch.device) -> None:
        """Starts without counts, which make the loss of the first step 0."""
        if self._component.batch_balance:
            self.load.zero_()

    def init_parameter(self, name: str, fill: object) -> None:
        """There are none."""

    def forward(self, weights: Tensor, probabilities: Tensor, chosen: Tensor) -> Tensor:
        """Returns the weights with the losses attached.

        Args:
            weights: (B, S, K).
            probabilities: (B, S, E), each token's scores divided by their sum.
            chosen: (B, S, K).
        """
        one = self._component
        if not (self._counted or one.sequence_balance or one.micro_batch_balance):
            return weights
        counts = tally(chosen, self._experts)
        if self._counted:
            self._chosen.add(counts.sum(0))
        length = chosen.shape[1] * self._sequences.pieces
        mean = probabilities.sum(1) / length  # this rank's part of P
        if one.sequence_balance:
            value = (self._relative(self._sequences.add_up(counts)) * mean).sum()
            weights = self._attach(weights, value, "sequence", one.sequence_balance)
        if one.batch_balance:
            value = (self._relative(self.load).to(mean) * mean).sum()
            weights = self._attach(weights, value, "batch", one.batch_balance)
        if one.micro_batch_balance:
            # `mean` is divided by the positions of all pieces, and this loss is of this rank's piece alone
            value = (self._relative(counts.sum(0)) * mean.mean(0) * self._sequences.pieces).sum()
            weights = self._attach(weights, value, "micro_batch", one.micro_batch_balance)
        return weights

    def _relative(self, counts: Tensor) -> Tensor:
        """Returns (…, E) divided by the mean of an expert's set; 0 where nothing was counted."""
        return counts / set_means(counts, self.sets).clamp(min=torch.finfo(counts.dtype).tiny)

    def _attach(self, weights: Tensor, value: Tensor, scope: str, weight: float) -> Tensor:
        # One value for each micro-batch, of which the objective has the mean; the others are sums over sequences
        unit: Unit = "layer" if scope == "micro_batch" else "sequence"
        name, weight = f"moe/{scope}_balance", weight * self._share
        return self._auxiliary.attach(weights, value, unit=unit, name=name, weight=weight)

    def after_update(self) -> None:
        """Keeps the counts of the step for the loss of the next one, if there was an update."""
        if self._component.batch_balance:
            counted = self._auxiliary.counted(CHOSEN, self._layer)
            self.load.copy_(counted.where(counted.any(), self.load))  # no counts: the update was skipped
