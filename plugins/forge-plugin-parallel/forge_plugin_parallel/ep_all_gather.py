"""The dispatcher `all_gather`.

Shapes: T tokens of a rank, L the most of any rank; K choices of each; D model width; R ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor
from torch.nn import functional as F

from forge_kit.nn.dispatch import Dispatched, ExpertRanks
from forge_kit.torch_internals import FakeTensor
from forge_plugin_parallel.collectives import all_gather, gather_rows, reduce_scatter
from forge_plugin_parallel.ep_exchange import SendChoices, relative, tally, widened


@frozen
class AllGatherDispatcher:
    """See `forge_kit.nn.dispatch.TokenDispatcher`.

    Every rank receives the tokens of all ranks, with weights and choices, in the order of ranks. Each computes its part
    of all sums, (R L, D), and a reduce-scatter adds the parts up. Ranks with fewer tokens than others send padding that
    chooses no expert.
    """

    ranks: ExpertRanks

    def dispatch(self, tokens: Tensor, weights: Tensor, chosen: Tensor, rows: int | None) -> Dispatched:
        group, experts, _ = self.ranks
        longest, theirs = self._sizes(chosen, rows)
        padding = (0, 0, 0, longest - len(tokens))
        weights, chosen = SendChoices.apply(  # type: ignore[no-untyped-call]
            F.pad(widened(weights), padding),
            F.pad(chosen, padding, value=-1),
            lambda x: all_gather(x, 0, group),
            lambda grad: reduce_scatter(grad, 0, group),
        )
        local = relative(chosen, dist.get_rank(group) * experts, experts)
        return Dispatched(gather_rows(F.pad(tokens, padding), group), weights, local, theirs, state=len(tokens))

    def combine(self, outputs: Tensor, dispatched: Dispatched) -> Tensor:
        return reduce_scatter(outputs, 0, self.ranks.group)[: dispatched.state]

    def _sizes(self, chosen: Tensor, rows: int | None) -> tuple[int, int]:
        """Returns L, at least 1 as collectives need not take nothing, and how many choices this rank computes."""
        group, experts, _ = self.ranks
        ranks = dist.get_world_size(group)
        owners = torch.div(chosen, experts, rounding_mode="floor")
        own = torch.cat([chosen.new_full((1,), len(chosen)), tally(owners, ranks)])
        counts = all_gather(own, 0, group)
        if isinstance(counts, FakeTensor):  # a planned step has no routing: expect equally likely choices
            return max(len(chosen), 1), chosen.numel() if rows is None else rows
        # The one wait of the exchange: all counts in one transfer
        of_ranks = counts.unflatten(0, (ranks, -1)).tolist()
        return max(1, *(tokens for tokens, *_ in of_ranks)), sum(row[1 + dist.get_rank(group)] for row in of_ranks)
