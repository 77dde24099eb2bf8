"""Differentiable collectives over the ranks of a group, each with the one that undoes it as its backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from attrs import define
from torch import Tensor
from torch.autograd.function import once_differentiable

# Their names since torch 2.13, and the ones before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The ranks' parts put together along a dimension. Backward: sum over ranks, this rank's part of it."""
    return _apply(x, lambda x: _gathered(x, dim, group), lambda grad: _scattered(grad, dim, group))


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks, this rank's part of it along a dimension. Backward: the parts put together."""
    return _apply(x, lambda x: _scattered(x, dim, group), lambda grad: _gathered(grad, dim, group))


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks, of which each then computes the same. Backward: as it is."""
    return _apply(x, lambda x: _summed(x, group), lambda grad: grad)


def fan_out(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """As it is, equal on all ranks, of which each then computes something else. Backward: sum over ranks."""
    return _apply(x, lambda x: x.view_as(x), lambda grad: _summed(grad, group))


def gather_equal(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The ranks' parts put together, from which each rank then computes the same. Backward: this rank's part."""
    return _apply(x, lambda x: _gathered(x, dim, group), lambda grad: _own(grad, dim, group))


def all_to_all(x: Tensor, split: int, join: int, group: dist.ProcessGroup) -> Tensor:
    """Every rank gives every other its part along dimension `split`; what arrives is put together along `join`.
    Backward: the same with the two exchanged."""
    return _apply(x, lambda x: _exchanged(x, split, join, group), lambda grad: _exchanged(grad, join, split, group))


def exchange_rows(x: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """(Σ sent, …) to (Σ received, …): so many rows go to each rank, in order, and so many come from each. Backward: the
    same with the two exchanged."""
    return _apply(x, lambda x: _sent(x, sent, received, group), lambda grad: _sent(grad, received, sent, group))


def send_rows(
    x: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> Callable[[], Tensor]:
    """Like `exchange_rows`, in two parts: what this gives waits for the rows, and gives them; to be called once. What
    is computed in between is computed while rows travel, and its gradients while theirs travel back, as the backward
    pass takes what was computed last first."""
    there, back = _Journey(), _Journey()
    ticket = _apply(x, partial(there.begin, sent=sent, received=received, group=group), back.end)
    return lambda: _apply(ticket, there.end, partial(back.begin, sent=received, received=sent, group=group))


@define
class _Journey:
    """Rows on their way. Meanwhile a ticket, a tensor without elements, stands for them in the graph of autograd."""

    work: dist.Work | None = None
    source: Tensor | None = None
    """What is being sent: it must not be freed meanwhile."""
    arriving: Tensor | None = None

    def begin(self, x: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        self.source, self.arriving = x.contiguous(), x.new_empty(sum(received), *x.shape[1:])
        self.work = dist.all_to_all_single(
            self.arriving, self.source, list(received), list(sent), group=group, async_op=True
        )
        return x.new_empty(0)

    def end(self, ticket: Tensor) -> Tensor:
        work, arrived = self.work, self.arriving
        assert work is not None
        assert arrived is not None
        work.wait()
        self.work = self.source = self.arriving = None
        return arrived


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
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.undo(grad), None, None


def _gathered(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    ranks = dist.get_world_size(group)
    parts = x.new_empty(ranks * x.shape[0], *x.shape[1:])
    _all_gather(parts, x.contiguous(), group=group)
    return parts if dim == 0 else torch.cat(parts.chunk(ranks), dim)


def _scattered(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    ranks = dist.get_world_size(group)
    parts = x.contiguous() if dim == 0 else torch.cat(x.chunk(ranks, dim))
    own = x.new_empty(parts.shape[0] // ranks, *parts.shape[1:])
    _reduce_scatter(own, parts, group=group)
    return own


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _own(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].contiguous()


def _exchanged(x: Tensor, split: int, join: int, group: dist.ProcessGroup) -> Tensor:
    sent = torch.stack(x.chunk(dist.get_world_size(group), split))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), join)
