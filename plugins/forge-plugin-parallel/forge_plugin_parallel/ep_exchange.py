"""Sends tokens to the ranks that hold their experts, and results back (GShard, Lepikhin et al. 2020).

Shapes: T tokens; K choices of each; C copies of them, one for each token and each rank that holds any of its experts;
D model width; R ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from forge_kit.nn.dispatch import Dispatch, ExpertStack
from forge_kit.torch_internals import FakeTensor
from forge_plugin_parallel.collectives import exchange_rows, send_rows
from forge_plugin_parallel.tp_ways import local_parameters


@frozen
class LocalExperts:
    """A stack that computes with this rank's experts; see `forge_kit.nn.dispatch.ExpertStack`."""

    stack: nn.Module
    forward: ExpertStack

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        with local_parameters(*self.stack.modules()):
            return self.forward(*args, **kwargs)


@frozen
class Exchange:
    """A stack whose experts are divided equally over the ranks of a group, in the order of ranks.

    See `forge_kit.nn.dispatch.ExpertStack`.

    A token is sent once to each rank that holds any of its experts, with its weights and choices. That rank sums the
    results of its experts, and sends the sum back. Two large collectives a pass carry tokens and sums; two small ones
    before them carry counts, weights and choices. The host waits for the counts, which are the sizes to send.

    Where nodes share a stack and the ranks of each node share its part, one exchange is the `forward` of another. A
    token is then sent once to each node that holds any of its experts.
    """

    forward: ExpertStack
    """The stack of this rank's experts, or of its node's."""
    group: dist.ProcessGroup
    experts: int
    """Number of experts of each rank, or of each node."""
    outer: int = 1
    """Nodes over which an outer exchange has distributed tokens already."""
    overlap: bool = True
    """Whether `overlap_fn` is called while tokens are being sent, or before."""

    def __call__(
        self,
        tokens: Tensor,
        weights: Tensor,
        chosen: Tensor,
        rows: int | None = None,
        overlap_fn: Callable[[], None] | None = None,
    ) -> Tensor:
        if overlap_fn is not None and not self.overlap:
            overlap_fn()
        ranks = dist.get_world_size(self.group)
        # Rounded down, so that -1, no expert, stays -1
        owners = torch.div(chosen, self.experts, rounding_mode="floor")
        ranks_of = _each_once(owners)
        # Counts first: all-to-all needs the sizes on both sides before tokens can be sent.
        asked = torch.stack([_tally(ranks_of, ranks), _tally(owners, ranks)], 1)  # (R, 2): tokens, and their choices
        offered = torch.empty_like(asked)
        dist.all_to_all_single(offered, asked, group=self.group)
        trip, theirs = self._sizes(chosen, rows, asked, offered)

        dispatch = Dispatch.to_groups(ranks_of, ranks, sum(trip.sent))
        # Numbers relative to the receiver's first expert; -1 for the choices that others compute
        first = ranks_of.flatten().index_select(0, dispatch.choices).unsqueeze(1) * self.experts
        local = chosen.index_select(0, dispatch.sources) - first
        local = local.where((local >= 0) & (local < self.experts), -1)
        # 32 bits at least, as expert numbers travel in the same tensor
        weights = dispatch.to_rows(weights.to(torch.promote_types(weights.dtype, torch.float32)))
        # Before the tokens, as they are small; tokens then stay in flight while `overlap_fn` runs.
        weights, chosen = _SendChoices.apply(weights, local, trip)  # type: ignore[no-untyped-call]
        arrive = trip.depart(dispatch.to_rows(tokens))
        if overlap_fn is not None and self.overlap:
            overlap_fn()
        return dispatch.add_up(trip.back(self.forward(arrive(), weights, chosen, theirs)))

    def _sizes(self, chosen: Tensor, rows: int | None, asked: Tensor, offered: Tensor) -> tuple[_Trip, int]:
        """Returns how many copies are sent to and received from each rank, and how many choices this rank computes."""
        if isinstance(asked, FakeTensor):  # a planned step has no routing: expect equally likely choices
            ranks, (tokens, choices) = len(asked), chosen.shape
            before = places_of_a_token(self.outer, self.experts * ranks, choices)
            after = places_of_a_token(self.outer * ranks, self.experts, choices)
            copies = round(tokens * after / before)
            shares = [len(part) for part in torch.arange(copies).tensor_split(ranks)]
            return _Trip(shares, shares, self.group), chosen.numel() if rows is None else rows
        # The one wait of the exchange: all counts in one transfer
        sent, received, theirs = torch.stack([asked[:, 0], *offered.unbind(1)]).tolist()
        return _Trip(sent, received, self.group), sum(theirs)


def places_of_a_token(places: int, experts: int, choices: int) -> float:
    """Returns the mean number of places that hold any of a token's experts, if all sets of experts are equally likely.

    Used while a step is planned, when no routing is known.

    Args:
        places: ranks or nodes that share the experts.
        experts: experts of each place.
        choices: experts that a token chooses (K).
    """
    everywhere, choices = places * experts, min(choices, places * experts)
    return places * (1 - math.comb(everywhere - experts, choices) / math.comb(everywhere, choices))


@frozen
class _Trip:
    """The sizes of an exchange: copies to their ranks, and results back."""

    sent: Sequence[int]
    received: Sequence[int]
    group: dist.ProcessGroup

    def depart(self, x: Tensor) -> Callable[[], Tensor]:
        return send_rows(x, self.sent, self.received, self.group)

    def there(self, x: Tensor) -> Tensor:
        return exchange_rows(x, self.sent, self.received, self.group)

    def back(self, x: Tensor) -> Tensor:
        return exchange_rows(x, self.received, self.sent, self.group)


class _SendChoices(torch.autograd.Function):
    """Sends weights (C, K) and expert numbers (C, K) to the ranks of the copies, in one collective.

    The numbers' bits are viewed as floats, without conversion. Backward: gradients of the weights only.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, chosen: Tensor, trip: _Trip) -> tuple[Tensor, Tensor]:
        ctx.trip = trip
        integers = torch.int64 if weights.dtype == torch.float64 else torch.int32
        arrived = trip.there(torch.cat([weights, chosen.to(integers).view(weights.dtype)], 1))
        weights, bits = (part.contiguous() for part in arrived.chunk(2, 1))
        chosen = bits.view(integers).long()
        ctx.mark_non_differentiable(chosen)
        return weights, chosen

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None, None]:
        return ctx.trip.back(grad), None, None


def _each_once(owners: Tensor) -> Tensor:
    """(T, K) with each owner of a token once, and -1 for repetitions."""
    # Sorted, so that equal owners are neighbours
    ordered, _ = owners.sort(1)
    again = ordered[:, 1:] == ordered[:, :-1]
    return torch.cat([ordered[:, :1], ordered[:, 1:].masked_fill(again, -1)], 1)


def _tally(chosen: Tensor, groups: int) -> Tensor:
    """Counts (G,) of how often each group is chosen in (T, K)."""
    return (chosen.unsqueeze(-1) == torch.arange(groups, device=chosen.device)).sum((0, 1))
