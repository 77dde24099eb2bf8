"""Positions of a modality: gathered from the sequence, and put back.

A row has at most M positions of a modality, as many as its images have features, so M rows of activations are room for
all of them. Weights of the modality see M positions, and the text's all S: S + M and not 2 S, in shapes that do not
depend on the data, so that neither the host nor the compiler waits for numbers of positions.

Shapes: B sequences, S positions, M slots of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch

TEXT_ONLY = "positions of text only"
"""Batch entry of any shape: there are no routes, as all positions are text."""
TOKENS = ("input_ids", "labels", "positions", "document_ids")
"""Entries of a batch with a value for each position."""


class Route(NamedTuple):
    """The positions of a modality."""

    slots: Tensor
    """(B, M): number, among the B x S positions of the micro-batch, of each slot's position: in each row the positions
    of the modality in order, then any others. No two are equal."""
    filled: Tensor
    """(B, M): whether the slot's position is of the modality."""

    @classmethod
    def of(cls, members: Tensor, slots: int) -> Route:
        """Returns the route of the positions that `members` (B, S) marks, at most `slots` in each row."""
        rows, length = members.shape
        order = torch.arange(length, device=members.device).expand(rows, -1)
        if slots < length:
            # Members first; stable, so that they keep their order
            order = members.logical_not().byte().argsort(dim=1, stable=True)[:, :slots]
        starts = torch.arange(0, rows * length, length, device=members.device)
        return cls(order + starts.unsqueeze(1), members.gather(1, order))

    def take(self, x: Tensor) -> Tensor:
        """(B, S, …) -> (B, M, …). The rows of slots that are left over are any, and receive no gradient."""
        if self._is_whole(x):
            return x
        return _Take.apply(x, *self)  # type: ignore[no-untyped-call]

    def put(self, own: Tensor, other: Tensor) -> Tensor:
        """Returns `own` (B, S, …) with the rows of `other` (B, M, …) at the positions of the modality."""
        if self._is_whole(own):
            return other.where(_like(self.filled, own), own)  # the same, without a gather
        return _Put.apply(own, other, *self)  # type: ignore[no-untyped-call]

    def _is_whole(self, x: Tensor) -> bool:
        """Whether there are as many slots as positions: then they are the positions in order."""
        return self.slots.shape[1] == x.shape[1]


# Each is the gradient of the other. Slots are of different positions, so that no two writes meet, which the backward
# pass of `index_select` could not know: it would add them up one by one.
class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor, filled: Tensor) -> Tensor:
        ctx.save_for_backward(slots, filled)
        ctx.shape = x.shape
        return _rows(x, slots)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        slots, filled = ctx.saved_tensors
        return _with_rows(grad.new_zeros(ctx.shape), grad.masked_fill(~_like(filled, grad), 0), slots), None, None


class _Put(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, other: Tensor, slots: Tensor, filled: Tensor) -> Tensor:
        ctx.save_for_backward(slots, filled)
        return _with_rows(own, other.where(_like(filled, own), _rows(own, slots)), slots)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        slots, filled = ctx.saved_tensors
        rows, filled = _rows(grad, slots), _like(filled, grad)
        return _with_rows(grad, rows.masked_fill(filled, 0), slots), rows.masked_fill(~filled, 0), None, None


def _rows(x: Tensor, slots: Tensor) -> Tensor:
    """(B, S, …) -> (B, M, …): the rows of the slots' positions."""
    return x.flatten(0, 1).index_select(0, slots.flatten()).unflatten(0, slots.shape)


def _with_rows(x: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    """Returns x (B, S, …) with `rows` (B, M, …) at the slots' positions."""
    return x.flatten(0, 1).index_copy(0, slots.flatten(), rows.flatten(0, 1)).view_as(x)


def _like(values: Tensor, x: Tensor) -> Tensor:
    """(B, N) with as many dimensions as `x`."""
    return values.reshape(*values.shape, *(1,) * (x.ndim - 2))


# --- as entries of a batch -------------------------------------------------------------------------------------------


def with_routes(batch: Batch, codes: Mapping[str, int], slots: int, share: tuple[int, int]) -> Batch:
    """Returns the batch with the routes of all its positions, and of those that this rank keeps between split matrices.

    Args:
        batch: `input_ids` (B, S).
        codes: entry of `input_ids` for each modality.
        slots: positions of a row's images at most.
        share: this rank's number among the tensor-parallel ranks, and how many there are: with sequence parallel each
            holds its part of the positions, except inside a split part.
    """
    ids, (rank, ranks) = batch["input_ids"], share
    # A split part sees all positions, and a norm between split parts this rank's chunk.
    parts = [ids] if ranks == 1 or ids.shape[1] % ranks else [ids, ids.chunk(ranks, 1)[rank]]
    entries: dict[str, Tensor] = {}
    for modality, code in codes.items():
        for part in parts:
            route = Route.of(part == code, min(slots, part.shape[1]))
            entries |= zip(_keys(modality, part.shape[1]), route, strict=True)
        # Of all positions: feed-forward parts, which read these entries, run inside a split part.
        whole = Route(*(entries[key] for key in _keys(modality, ids.shape[1])))
        entries |= {_of(modality, name): whole.take(batch[name]) for name in TOKENS if name in batch}
    return {**batch, **entries}


def route_in(batch: Batch, modality: str, length: int) -> Route | None:
    """Returns the route for activations of `length` positions; None in a batch of text."""
    if TEXT_ONLY in batch:
        return None
    return Route(*(batch[key] for key in _keys(modality, length)))


def tokens_of(batch: Batch, modality: str) -> Batch:
    """Returns the batch with the token entries (B, M) of the modality's slots, among the positions of whole rows."""
    return {**batch, **{name: batch[_of(modality, name)] for name in TOKENS if _of(modality, name) in batch}}


def _keys(modality: str, length: int) -> tuple[str, str]:
    return f"slots of {modality} in {length}", f"filled slots of {modality} in {length}"


def _of(modality: str, name: str) -> str:
    return f"{name} of {modality}"
