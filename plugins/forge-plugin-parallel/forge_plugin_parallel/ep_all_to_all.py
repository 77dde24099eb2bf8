"""The dispatcher `all_to_all`.

Shapes: T tokens; K choices of each; C copies of them, one for each token and each rank that holds any of its experts;
D model width; R ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from forge_kit.nn.dispatch import Dispatch, Dispatched, ExpertRanks
from forge_kit.torch_internals import FakeTensor
from forge_plugin_parallel.collectives import exchange_rows, send_rows
from forge_plugin_parallel.ep_exchange import SendChoices, relative, tally, widened


@frozen
class AllToAllDispatcher:
    """See `forge_kit.nn.dispatch.TokenDispatcher`.

    A token is sent once to each rank that holds any of its experts, with its weights and choices. That rank sums the
    results of its experts, and sends the sum back. Two large collectives a pass carry tokens and sums; two small ones
    before them carry counts, weights and choices. The host waits for the counts, which are the sizes to send.
    """

    ranks: ExpertRanks

    def dispatch(self, tokens: Tensor, weights: Tensor, chosen: Tensor, rows: int | None) -> Dispatched:
        group, experts, _ = self.ranks
        ranks = dist.get_world_size(group)
        # Rounded down, so that -1, no expert, stays -1
        owners = torch.div(chosen, experts, rounding_mode="floor")
        ranks_of = _each_once(owners)
        # Counts first: all-to-all needs the sizes on both sides before tokens can be sent.
        asked = torch.stack([tally(ranks_of, ranks), tally(owners, ranks)], 1)  # (R, 2): tokens, and their choices
        offered = torch.empty_like(asked)
        dist.all_to_all_single(offered, asked, group=group)
        trip, theirs = self._sizes(chosen, rows, asked, offered)

        order = Dispatch.to_groups(ranks_of, ranks, sum(trip.sent))
        # Numbers relative to the receiver's first expert; -1 for the choices that others compute
        first = ranks_of.flatten().index_select(0, order.choices).unsqueeze(1) * experts
        local = relative(chosen.index_select(0, order.sources), first, experts)
        # Before the tokens, as they are small; tokens then stay in flight while other computation runs.
        weights, chosen = SendChoices.apply(  # type: ignore[no-untyped-call]
            order.to_rows(widened(weights)), local, trip.there, trip.back
        )
        return Dispatched(trip.depart(order.to_rows(tokens)), weights, chosen, theirs, state=(order, trip))

    def combine(self, outputs: Tensor, dispatched: Dispatched) -> Tensor:
        order, trip = dispatched.state
        sums: Tensor = order.add_up(trip.back(outputs))
        return sums

    def _sizes(self, chosen: Tensor, rows: int | None, asked: Tensor, offered: Tensor) -> tuple[_Trip, int]:
        """Returns how many copies are sent to and received from each rank, and how many choices this rank computes."""
        group, experts, outer = self.ranks
        if isinstance(asked, FakeTensor):  # a planned step has no routing: expect equally likely choices
            ranks, (tokens, choices) = len(asked), chosen.shape
            before = places_of_a_token(outer, experts * ranks, choices)
            after = places_of_a_token(outer * ranks, experts, choices)
            copies = round(tokens * after / before)
            shares = [len(part) for part in torch.arange(copies).tensor_split(ranks)]
            return _Trip(shares, shares, group), chosen.numel() if rows is None else rows
        # The one wait of the exchange: all counts in one transfer
        sent, received, theirs = torch.stack([asked[:, 0], *offered.unbind(1)]).tolist()
        return _Trip(sent, received, group), sum(theirs)


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


def _each_once(owners: Tensor) -> Tensor:
    """(T, K) with each owner of a token once, and -1 for repetitions."""
    # Sorted, so that equal owners are neighbours
    ordered, _ = owners.sort(1)
    again = ordered[:, 1:] == ordered[:, :-1]
    return torch.cat([ordered[:, :1], ordered[:, 1:].masked_fill(again, -1)], 1)
