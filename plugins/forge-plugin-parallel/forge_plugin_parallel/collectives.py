"""Differentiable collectives over the ranks of a group; the backward pass of each is its transpose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from attrs import define
from torch import Tensor
from torch.autograd.function import once_differentiable

# Names since torch 2.13; earlier versions have the second ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Concatenates the ranks' parts along `dim`. Backward: reduce-scatter (gradients differ by rank)."""
    return _apply(x, lambda x: _gathered(x, dim, group), lambda grad: _scattered(grad, dim, group))


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Returns this rank's part, along `dim`, of the sum over ranks. Backward: all-gather."""
    return _apply(x, lambda x: _scattered(x, dim, group), lambda grad: _gathered(grad, dim, group))


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sums over ranks, where each rank then computes the same. Backward: the identity."""
    return _apply(x, lambda x: _summed(x, group), lambda grad: grad)


def fan_out(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The identity on a tensor equal on all ranks, where computation then differs by rank. Backward: all-reduce."""
    return _apply(x, lambda x: x.view_as(x), lambda grad: _summed(grad, group))


def gather_equal(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Concatenates the ranks' parts, where each rank then computes the same. Backward: this rank's part (no sum)."""
    return _apply(x, lambda x: _gathered(x, dim, group), lambda grad: _own(grad, dim, group))


def all_to_all(x: Tensor, split: int, join: int, group: dist.ProcessGroup) -> Tensor:
    """Sends each rank its part along dimension `split`, and concatenates received parts along `join`.

    Backward: the same with `split` and `join` exchanged.
    """
    return _apply(x, lambda x: _exchanged(x, split, join, group), lambda grad: _exchanged(grad, join, split, group))


def exchange_rows(x: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Exchanges rows: (Σ sent, …) to (Σ received, …).

    Args:
        x: rows ordered by the rank they are sent to.
        sent: number of rows for each rank.
        received: number of rows from each rank.
        group: the ranks.
    """
    return _apply(x, lambda x: _sent(x, sent, received, group), lambda grad: _sent(grad, received, sent, group))


def send_rows(
    x: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> Callable[[], Tensor]:
    """Starts `exchange_rows` without waiting for it.

    Computation between this call and the wait overlaps with the exchange. Its backward pass overlaps with the exchange
    of the gradients, because autograd runs later operations first.

    Returns:
        A function that waits for the rows and returns them; to be called once.
    """
    there = _Journey(sum(received), _exchange(sent, received, group))
    return there.outward(x, _Journey(sum(sent), _exchange(received, sent, group)))


def gather_rows(x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Starts to concatenate the ranks' rows, equally many each, without waiting; see `send_rows`.

    Backward: reduce-scatter (gradients differ by rank).
    """
    rows, ranks = len(x), dist.get_world_size(group)
    there = _Journey(rows * ranks, partial(_all_gather, group=group, async_op=True))
    return there.outward(x, _Journey(rows, partial(_reduce_scatter, group=group, async_op=True)))


@define
class _Journey:
    """Rows in flight. Meanwhile a ticket, a tensor without elements, represents them in the autograd graph."""

    rows: int
    """Rows that arrive."""
    start: Callable[[Tensor, Tensor], dist.Work | None]
    """Starts a collective from the second tensor to the first."""
    work: dist.Work | None = None
    source: Tensor | None = None
    """The rows being sent, referenced so that their memory is not reused before they are."""
    arriving: Tensor | None = None

    def outward(self, x: Tensor, back: _Journey) -> Callable[[], Tensor]:
        """Begins with x, and returns the function that ends; gradients travel `back`."""
        ticket = _apply(x, self.begin, back.end)
        return lambda: _apply(ticket, self.end, back.begin)

    def begin(self, x: Tensor) -> Tensor:
        self.source, self.arriving = x.contiguous(), x.new_empty(self.rows, *x.shape[1:])
        self.work = self.start(self.arriving, self.source)
        return x.new_empty(0)

    def end(self, ticket: Tensor) -> Tensor:
        work, arrived = self.work, self.arriving
        assert work is not None
        assert arrived is not None
        work.wait()
        # Only now may the memory of the sent rows be reused: the collective reads it until it is done.
        self.work = self.source = self.arriving = None
        return arrived


def _exchange(
    sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> Callable[[Tensor, Tensor], dist.Work | None]:
    def start(arriving: Tensor, source: Tensor) -> dist.Work | None:
        return dist.all_to_all_single(arriving, source, list(received), list(sent), group=group, async_op=True)

    return start


def _sent(x: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    arrived = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(arrived, x.contiguous(), list(received), list(sent), group=group)
    return arrived


def _apply(x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Tensor:
    return _Collective.apply(x, forward, backward)  # type: ignore[no-untyped-call]


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.undo = backward
        result = forward(x)
        # Compiled by torch 2.11, a function loses the gradient of its input if its last operation returns its own
        # argument, as collectives and conversions without effect do. A view is another tensor.
        return result.view_as(result) if torch.compiler.is_compiling() else result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.undo(grad), None, None


def _gathered(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    ranks = dist.get_world_size(group)
    parts = x.new_empty(ranks * x.shape[0], *x.shape[1:])
    # Collectives concatenate along dimension 0; another dimension costs a copy.
    _all_gather(parts, x.contiguous(), group=group)
    return parts if dim == 0 else torch.cat(parts.chunk(ranks), dim)


def _scattered(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    ranks = dist.get_world_size(group)
    parts = x.contiguous() if dim == 0 else torch.cat(x.chunk(ranks, dim))
    own = x.new_empty(parts.shape[0] // ranks, *parts.shape[1:])
    _reduce_scatter(own, parts, group=group)
    return own


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    # A copy: the reduction is in place, and autograd may have saved the input.
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _own(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].contiguous()


def _exchanged(x: Tensor, split: int, join: int, group: dist.ProcessGroup) -> Tensor:
    # Contiguous: `stack` may keep the order in memory of a gradient that is laid out as "channels last".
    sent = torch.stack(x.chunk(dist.get_world_size(group), split)).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), join)
