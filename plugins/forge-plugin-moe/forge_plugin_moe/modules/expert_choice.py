"""The router `expert_choice`. Shapes: B sequences, S positions, D width, E experts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forge_plugin_moe.modules.capacity import largest, refuse_documents
from forge_plugin_moe.modules.scores import LinearScores

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Batch
    from forge_plugin_moe.moe import ExpertChoice


class ExpertChoiceRouter(LinearScores):
    """See `forge_plugin_moe.ExpertChoice`."""

    leaves_out = True
    mixes_positions = True  # whether an expert takes a token depends on the others of its sequence

    def __init__(self, component: ExpertChoice, context: BuildContext, dim: int, experts: int) -> None:
        super().__init__(component, context, dim, experts)
        self._factor = component.capacity_factor
        self.experts_per_token = min(component.capacity_factor, experts)

    def forward(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns weights and numbers (B, S, E): expert e at place e, or weight 0 and number -1 if it skips the token.

        Collective over the ranks that share a sequence.

        Raises:
            ForgeError: the batch has `document_ids`.
        """
        refuse_documents(batch)
        logits = self.logits(x)
        probabilities = logits.softmax(-1)
        length, experts = x.shape[1] * self.sequences.pieces, logits.shape[-1]
        capacity = max(1, math.ceil(self._factor * length / experts))
        taken = largest(probabilities, capacity, self.sequences, batch)
        ids = torch.arange(experts, device=x.device).expand_as(taken)
        weights = self.penalise(probabilities, logits)
        return weights.where(taken, 0), ids.where(taken, -1)
