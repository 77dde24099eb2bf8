"""Reductions over whole sequences, which context-parallel ranks hold in pieces.

Shapes: B sequences, S positions of this rank, K choices of a token, E experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from forge_kit.nn.batches import PLACES

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Batch


@frozen
class Sequences:
    """Collectives over the pieces of a sequence. None of them is differentiable."""

    pieces: int
    """Ranks that share a sequence, in equal parts."""
    _group: dist.ProcessGroup | None

    @classmethod
    def of(cls, context: BuildContext) -> Sequences:
        """Returns the collectives for a run's layout."""
        pieces = context.layout.cp
        return cls(pieces, context.mesh.get_group("cp") if context.mesh is not None and pieces > 1 else None)

    def add_up(self, values: Tensor) -> Tensor:
        """Returns (B, …) summed over the pieces of each sequence."""
        # A copy, as the reduction is in place
        total = values.detach().clone()
        if self._group is not None:
            dist.all_reduce(total, group=self._group)
        return total

    def own(self, values: Tensor, batch: Batch) -> Tensor:
        """Returns this rank's (B, S, E) of values for whole sequences, such as `whole` returns."""
        return values if self._group is None else values.gather(1, _index(batch, values))

    def whole(self, values: Tensor, batch: Batch) -> Tensor:
        """(B, S, E) to the values of all pieces, (B, pieces x S, E), in the order of positions.

        The order of ranks differs, and depends on their number: each may hold a chunk from both ends.
        """
        if self._group is None:
            return values.detach()
        whole = values.new_zeros(values.shape[0], self.pieces * values.shape[1], values.shape[2])
        # Each position is on one rank and 0 on all others, so that the sum has every value unrounded
        whole.scatter_(1, _index(batch, values), values.detach())
        dist.all_reduce(whole, group=self._group)
        return whole


def _index(batch: Batch, values: Tensor) -> Tensor:
    return batch[PLACES].unsqueeze(-1).expand(-1, -1, values.shape[-1])


def tally(chosen: Tensor, experts: int) -> Tensor:
    """(B, S, K), -1 being none, to (B, E), float32: how often each sequence chose each expert."""
    flat = chosen.flatten(1)
    # float32 is exact here: a sequence has fewer than 2^24 choices
    counts = torch.zeros(len(flat), experts, device=chosen.device)
    return counts.scatter_add_(1, flat.clamp(min=0), (flat >= 0).float())
