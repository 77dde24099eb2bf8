"""Auxiliary losses for the load balance of experts.

Shapes: B sequences, S positions of this rank, E experts, K experts of a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from forge_plugin_moe.modules.sequences import Sequences, tally

if TYPE_CHECKING:
    from forge_core.auxiliary import Unit
    from forge_core.contracts.contexts import BuildContext
    from forge_plugin_moe.moe import TopKRouter

CHOSEN = "moe/chosen"
"""Count of the tokens that chose each expert."""


class Balance(nn.Module):
    """Σ f P in three forms; see `forge_plugin_moe.moe.TopKRouter`.

    Only P has gradients, and all three are linear in it: so the parts of a sequence on different ranks add up.

    Buffers: `load` (E,), the last step's counts of the whole batch, if a loss needs them.

    Args:
        counted: whether choices are counted even if no loss needs it.
    """

    load: Tensor

    def __init__(self, component: TopKRouter, context: BuildContext, experts: int, counted: bool) -> None:
        super().__init__()
        self._component = component
        self._auxiliary, self._layer = context.auxiliary, context.layer or 0
        self._sequences = Sequences.of(context)
        self._share = 1 / context.layout.tp  # tensor-parallel ranks all compute this, and their gradients are summed
        self._experts = experts
        self._counted = counted or component.batch_balance > 0
        self._chosen = context.auxiliary.counter(CHOSEN, self._layer)
        if component.batch_balance:
            self.register_buffer("load", torch.empty(experts, dtype=torch.float64))

    def init_buffers(self, device: torch.device) -> None:
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
        even = length * chosen.shape[2] / self._experts
        mean = probabilities.sum(1) / length  # this rank's part of P
        if one.sequence_balance:
            value = (self._sequences.add_up(counts) / even * mean).sum()
            weights = self._attach(weights, value, "sequence", one.sequence_balance)
        if one.batch_balance:
            shares = self.load / self.load.mean().clamp(min=1)
            value = (shares.to(mean) * mean).sum()
            weights = self._attach(weights, value, "batch", one.batch_balance)
        if one.micro_batch_balance:
            value = (counts.mean(0) / (even / self._sequences.pieces) * mean.mean(0) * self._sequences.pieces).sum()
            weights = self._attach(weights, value, "micro_batch", one.micro_batch_balance)
        return weights

    def _attach(self, weights: Tensor, value: Tensor, scope: str, weight: float) -> Tensor:
        unit: Unit = "layer" if scope == "micro_batch" else "sequence"
        name, weight = f"moe/{scope}_balance", weight * self._share
        return self._auxiliary.attach(weights, value, unit=unit, name=name, weight=weight)

    def after_update(self) -> None:
        if self._component.batch_balance:
            counted = self._auxiliary.counted(CHOSEN, self._layer)
            self.load.copy_(counted.where(counted.any(), self.load))  # no counts: the update was skipped
