"""Reductions over whole sequences, which context-parallel ranks hold in pieces.

Shapes: B sequences, S positions of this rank, K choices of a token, E experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext


@frozen
class Sequences:
    """Collectives over the pieces of a sequence. None of them is differentiable."""

    pieces: int
    """Ranks that share a sequence, in equal parts."""
    _group: dist.ProcessGroup | None

    @classmethod
    def of(cls, context: BuildContext) -> Sequences:
        """Returns those of a run's layout."""
        pieces = context.layout.cp
        return cls(pieces, context.mesh.get_group("cp") if context.mesh is not None and pieces > 1 else None)

    def add_up(self, values: Tensor) -> Tensor:
        """Returns (B, …) summed over the pieces of each sequence."""
        total = values.detach().clone()
        if self._group is not None:
            dist.all_reduce(total, group=self._group)
        return total

    def own(self, values: Tensor) -> Tensor:
        """Returns this rank's (B, S, …) of values for whole sequences, such as `gather` returns."""
        if self._group is None:
            return values
        return values.chunk(self.pieces, 1)[dist.get_rank(self._group)]

    def gather(self, values: Tensor) -> Tensor:
        """(B, S, …) to those of all pieces, (B, pieces x S, …), in the order of ranks."""
        if self._group is None:
            return values.detach()
        parts = [torch.empty_like(values) for _ in range(self.pieces)]
        dist.all_gather(parts, values.detach().contiguous(), group=self._group)
        return torch.cat(parts, 1)


def tally(chosen: Tensor, experts: int) -> Tensor:
    """(B, S, K), -1 being none, to (B, E), float32: how often each sequence chose each expert."""
    flat = chosen.flatten(1)
    counts = torch.zeros(len(flat), experts, device=chosen.device)
    return counts.scatter_add_(1, flat.clamp(min=0), (flat >= 0).float())
