"""Attention whose scores are watched in training, and are made smaller by its weights (QK-Clip).

A score is the product of a query and a key, times the factor of the attention: what the softmax gets, before any cap.

Shapes: H query heads over all tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from forge_core.parallel.mesh import local_part
from forge_kit.torch_internals import part_offsets

if TYPE_CHECKING:
    from forge_kit.nn.modules import Linear


class ScoreWatch:
    """Counts the largest scores of a layer's heads.

    Args:
        count: takes values (H,): `add` of a counter of `forge_core.auxiliary.Auxiliary` with `largest=True`.
        rank: of `ranks`, each of which has as many heads.
        ranks: tensor-parallel ones.
    """

    def __init__(self, count: Callable[[Tensor], object], rank: int, ranks: int) -> None:
        self._count, self._rank, self._ranks = count, rank, ranks

    def add(self, scores: Tensor) -> None:
        """Add the largest scores of this rank's heads, (H / ranks,)."""
        others = torch.full_like(scores, -torch.inf)
        # Counters of ranks are joined by the largest value, to which -inf at heads of others adds nothing
        self._count(torch.cat([scores if rank == self._rank else others for rank in range(self._ranks)]))


@runtime_checkable
class ClipsScores(Protocol):
    """Attention whose weights can make its scores smaller, head by head."""

    score_watch: ScoreWatch | None
    """To which a forward pass in training adds the largest scores among positions that see each other, if it is set."""

    def unscalable(self) -> str:
        """Returns why weights do not scale the scores, such as a norm of queries; empty if they do."""
        ...

    def scale_scores(self, factors: Tensor, query_share: float) -> None:
        """Multiply the scores of each head by a factor, in place, by the weights of its query and its key.

        Query heads that share a key have the smallest of their factors.

        Args:
            factors: (H,).
            query_share: a, where weights of queries are multiplied by factorᵃ and those of keys by the rest.
        """
        ...


@torch.no_grad()
def scale_rows(linear: Linear, factors: Tensor) -> None:
    """Multiply the outputs of a linear layer by `factors` (outputs,), in place, under any sharding."""
    for parameter in (linear.weight, linear.bias):
        if parameter is not None:
            part, first = local_part(parameter), part_offsets(parameter)[0]
            rows = factors[first : first + len(part)].to(part.dtype)
            part.mul_(rows.unflatten(0, (-1, *[1] * (part.ndim - 1))))
