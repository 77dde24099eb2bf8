"""The router `moma` with `choose = "experts"`.

Shapes: B sequences, S positions, D width, E experts, K experts of the largest group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_kit.nn.modules import Linear
from forge_plugin_moe.modules.capacity import largest, refuse_documents
from forge_plugin_moe.modules.scores import LinearScores
from forge_plugin_moma.modules.groups import Groups, masked
from forge_plugin_moma.modules.noise import GumbelNoise
from forge_plugin_moma.modules.skip_metrics import Skipped

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Batch
    from forge_plugin_moma.moma import MoMa

DECISIONS = "moma/decisions"
"""Counts of an auxiliary router's decisions: the ones that match the experts' decisions, and all."""


class WideLinear(Linear):
    """A `Linear` whose products are in float32 or wider."""

    def forward(self, x: Tensor) -> Tensor:
        """Maps (…, in) to (…, out), whatever the dtype of x."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        return F.linear(x.to(dtype), self.weight.to(x.dtype).to(dtype))  # rounded first, as under FSDP


class AuxiliaryRouter(nn.Module):
    """Predicts from a position alone which experts of a group choose it: equation 3, before its sigmoid.

    The first product is as large as one of an expert's, and in the compute dtype; the second decides.
    """

    def __init__(self, dim: int, experts: int, std: float) -> None:
        super().__init__()
        self.up = Linear(dim, max(1, dim // 2), std=std)
        self.down = WideLinear(max(1, dim // 2), experts, std=std)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, D) to logits (B, S, experts)."""
        return self.down(F.silu(self.up(x)))


class ModalityExpertChoice(LinearScores):
    """See `forge_plugin_moma.MoMa`."""

    leaves_out = True
    mixes_positions = True  # whether an expert takes a token depends on the others of its sequence

    def __init__(self, component: MoMa, context: BuildContext, dim: int) -> None:
        groups = Groups(dict(component.experts))
        super().__init__(component, context, dim, groups.count)
        self.groups, self.expert_sets = groups, groups.sizes
        self._factor = 1.0 if component.capacity_factor is None else component.capacity_factor
        self._weight = 1.0 if component.auxiliary_weight is None else component.auxiliary_weight
        self.experts_per_token = self._factor  # a mean: a position may go through none, or all of its group
        self.noise = GumbelNoise(self.layer, self.groups.count) if component.gumbel_noise else None
        routers = {name: AuxiliaryRouter(dim, size, component.init_std) for name, size in self.expert_sets.items()}
        self.auxiliary_routers = nn.ModuleDict(routers)
        self.skipped = Skipped(context, self.groups)
        self._decisions = context.auxiliary.counter(DECISIONS, self.layer)
        context.auxiliary.summarise(DECISIONS, summarise_decisions)

    def forward(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the weights and numbers of experts, (B, S, K) each, with 0 and -1 where there is none.

        In training experts choose; in evaluation the auxiliary routers do, which see no other position.

        Raises:
            ForgeError: in training, the batch has `document_ids`.
        """
        ids = batch["input_ids"]
        closed = self.groups.closed(ids)
        logits = self.logits(x)
        # Detached: learning to predict the choice does not change it.
        predicted = torch.cat([self.auxiliary_routers[name](x.detach()) for name in self.expert_sets], -1)
        if self.training:
            refuse_documents(batch)
            if self.noise is not None:
                logits = logits + self.noise(batch, logits.dtype)
            taken = self._choose(logits, closed, batch)
            weights = self._learn(logits.sigmoid(), predicted, taken, closed)
        else:
            taken, weights = (predicted > 0) & ~closed, logits.sigmoid()
        self.skipped.count(ids, ~taken.any(-1))
        weights = self.penalise(weights, masked(logits, closed))
        return self._of_group(weights, taken, ids)

    def _choose(self, logits: Tensor, closed: Tensor, batch: Batch) -> Tensor:
        """Returns (B, S, E), bool: the positions that each expert takes among its modality's in a sequence."""
        # In float64, as `ceil` would turn an error of rounding into one more position
        members = self.sequences.add_up((~closed).sum(1)).double()
        shares = [(self._factor * part / part.shape[-1]).ceil() for part in self.groups.split(members)]
        # By logits, which order positions as their sigmoids do and, where these round to 1, still differ.
        return largest(logits.masked_fill(closed, -torch.inf), torch.cat(shares, -1), self.sequences, batch)

    def _learn(self, weights: Tensor, predicted: Tensor, taken: Tensor, closed: Tensor) -> Tensor:
        """Returns the weights with the loss of the auxiliary routers attached."""
        right = ((predicted > 0) == taken) & ~closed
        self._decisions.add(torch.stack([right.sum(), (~closed).sum()]))  # experts of other modalities are no decisions
        losses = F.binary_cross_entropy_with_logits(predicted, taken.to(predicted), reduction="none")
        # The mean within a group, of which a position has one: positions count alike, whatever the size of their group.
        means = [part.mean(-1) for part in self.groups.split(losses.masked_fill(closed, 0))]
        value = torch.stack(means).sum() / (taken.shape[1] * self.sequences.pieces)
        weight = self._weight * self.share
        return self.auxiliary.attach(weights, value, unit="sequence", name="moma/auxiliary", weight=weight)

    def _of_group(self, weights: Tensor, taken: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S, E) to the weights and numbers of the experts of each position's group that take it, (B, S, K)."""
        widest = max(self.expert_sets.values())
        numbers = self.groups.first(ids).unsqueeze(-1) + torch.arange(widest, device=ids.device)
        inside = numbers < self.groups.count
        # Within bounds for `gather`; `inside` leaves these out
        numbers = numbers.clamp(max=self.groups.count - 1)
        # A number beyond a smaller group is of another group, whose experts do not take the position.
        chosen = inside & taken.gather(-1, numbers)
        return weights.gather(-1, numbers).where(chosen, 0), numbers.where(chosen, -1)


def summarise_decisions(rows: Mapping[int, Tensor]) -> Mapping[str, Tensor]:
    """Returns the share of right decisions, over all layers."""
    right, every = torch.stack(list(rows.values())).sum(0)
    return {"moma/auxiliary_accuracy": right / every.clamp(min=1)}
