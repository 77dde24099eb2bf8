"""Causal attention over positions that lie on several ranks, block by block.

A block is the queries of one rank and the keys of one. Its result and the logarithm of its softmax's normaliser are
all that is needed to put blocks together.

Shapes: B sequences, s query positions, t key positions, H query heads, K key/value heads, R = H / K, E width of a head,
V that of its values: E or less.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class Piece(NamedTuple):
    """Positions, as they lie on a rank."""

    places: Tensor
    """(s,) where they stand in the sequence."""
    documents: Tensor | None
    """(B, s) the number of each one's document; None: a sequence is one document."""

    def part(self, rows: slice) -> Piece:
        """Some of them."""
        return Piece(self.places[rows], None if self.documents is None else self.documents[:, rows])

    @classmethod
    def joined(cls, pieces: Sequence[Piece]) -> Piece:
        """All of them, one after the other."""
        documents = [piece.documents for piece in pieces if piece.documents is not None]
        return cls(torch.cat([piece.places for piece in pieces]), torch.cat(documents, 1) if documents else None)


def visible(queries: Piece, keys: Piece) -> Tensor:
    """Which key a query sees: none after it, none of another document. (B or 1, 1, s, t) bool."""
    mask = (queries.places[:, None] >= keys.places)[None, None]
    if queries.documents is None or keys.documents is None:
        return mask
    return mask & (queries.documents[:, None, :, None] == keys.documents[:, None, None, :])


def attend(q: Tensor, k: Tensor, v: Tensor, queries: Piece, keys: Piece) -> Tensor:
    """Attention of queries (B, s, H, E) over keys (B, t, K, E) and values (B, t, K, V), all here -> (B, s, H, V)."""
    width = v.shape[-1]
    if width < k.shape[-1]:  # else torch's fast kernels would not be used
        v = F.pad(v, (0, k.shape[-1] - width))
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    if q.shape[1] != k.shape[1]:
        k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], 1) for tensor in (k, v))
    return F.scaled_dot_product_attention(q, k, v, visible(queries, keys))[..., :width].transpose(1, 2)


def ring_attention(q: Tensor, k: Tensor, v: Tensor, pieces: Sequence[Piece], group: dist.ProcessGroup) -> Tensor:
    """Attention of this rank's queries (B, s, H, E) over all ranks' keys (B, s, K, E) and values (B, s, K, V) ->
    (B, s, H, V).

    Keys and values go round the ring of ranks; while a block is computed, the next one is on its way. The backward pass
    sends them round again, and their gradients with them.
    """
    return _Ring.apply(q, k, v, list(pieces), group)  # type: ignore[no-untyped-call]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, pieces: list[Piece], group: dist.ProcessGroup) -> Tensor:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        queries = _grouped(q, k.shape[2])
        wide = torch.promote_types(q.dtype, torch.float32)
        out = queries.new_zeros((*queries.shape[:-1], v.shape[-1]), dtype=wide)
        logsumexp = queries.new_full(queries.shape[:-1], -torch.inf, dtype=wide)
        here = torch.cat([k, v], -1)
        for turn in range(ranks):
            coming = _Shift(here, group) if turn < ranks - 1 else None
            rows, block = _block(queries, here, pieces, rank, (rank - turn) % ranks)
            combined = _combined(out[..., rows, :], logsumexp[..., rows], *block.forward())
            out[..., rows, :], logsumexp[..., rows] = combined
            here = coming.arrived() if coming is not None else here
        ctx.save_for_backward(q, k, v, out, logsumexp)
        ctx.pieces, ctx.group = pieces, group
        return _ungrouped(out).to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, logsumexp = ctx.saved_tensors
        pieces, group = ctx.pieces, ctx.group
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        queries, grad = _grouped(q, k.shape[2]), _grouped(grad, k.shape[2]).to(out.dtype)
        weighted = (grad * out).sum(-1)
        to_q, here = torch.zeros_like(queries, dtype=out.dtype), torch.cat([k, v], -1)
        to_here = torch.zeros_like(here, dtype=out.dtype)
        for turn in range(ranks):
            coming = _Shift(here, group) if turn < ranks - 1 else None
            rows, block = _block(queries, here, pieces, rank, (rank - turn) % ranks)
            parts = block.backward(grad[..., rows, :], logsumexp[..., rows], weighted[..., rows])
            to_q[..., rows, :] += parts[0]
            to_here[:, : block.k.shape[-2]] += torch.cat(parts[1:], -1)
            to_here = _Shift(to_here, group).arrived()  # ends up where its keys are from
            here = coming.arrived() if coming is not None else here
        to_k, to_v = to_here.to(k.dtype).split([k.shape[-1], v.shape[-1]], -1)
        return _ungrouped(to_q).to(q.dtype), to_k, to_v, None, None


class _Block(NamedTuple):
    """Queries of one rank, keys and values of one."""

    q: Tensor
    """(B, K, R, s, E)."""
    k: Tensor
    """(B, K, 1, t, E)."""
    v: Tensor
    """(B, K, 1, t, V)."""
    mask: Tensor
    """(B or 1, 1, 1, s, t) bool."""

    def forward(self) -> tuple[Tensor, Tensor]:
        """Result (B, K, R, s, V), and log-normalisers (B, K, R, s): -inf where a query sees no key here."""
        scores = self._scores()
        logsumexp = scores.logsumexp(-1)
        return (scores - _finite(logsumexp)[..., None]).exp_().to(self.v.dtype) @ self.v, logsumexp

    def backward(self, grad: Tensor, logsumexp: Tensor, weighted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q (B, K, R, s, E), k (B, t, K, E) and v (B, t, K, V), given the log-normalisers of all blocks
        together."""
        share = (self._scores() - logsumexp[..., None]).exp_()
        wide = share.dtype
        to_v = (share.mT @ grad).sum(2)
        to_scores = share.mul_(grad @ self.v.to(wide).mT - weighted[..., None]).mul_(self.q.shape[-1] ** -0.5)
        to_q, to_k = to_scores @ self.k.to(wide), (to_scores.mT @ self.q.to(wide)).sum(2)
        return to_q, to_k.transpose(1, 2), to_v.transpose(1, 2)

    def _scores(self) -> Tensor:
        """(B, K, R, s, t) in float32 or wider, -inf where a query does not see a key."""
        wide = torch.promote_types(self.q.dtype, torch.float32)
        scores = (self.q @ self.k.mT).to(wide).mul_(self.q.shape[-1] ** -0.5)
        return scores.masked_fill_(~self.mask, -torch.inf)


def _block(q: Tensor, kv: Tensor, pieces: Sequence[Piece], rank: int, other: int) -> tuple[slice, _Block]:
    """What the queries (B, K, R, s, E) of `rank` have to do with the keys and values (B, s, K, E + V) of another: which
    queries see any of these keys, and those with the first keys, as far as they are seen.

    Each rank has a piece from the front and its counterpart from the back. So of an earlier rank, all queries see the
    piece from the front, and nothing else; of a later one, the queries at the back see everything.
    """
    length = q.shape[-2]
    rows = slice(length // 2, length) if other > rank else slice(length)
    columns = slice(length // 2 if other < rank else length)
    width = q.shape[-1]
    k, v = kv[:, columns].transpose(1, 2).unsqueeze(2).split([width, kv.shape[-1] - width], -1)
    mask = visible(pieces[rank].part(rows), pieces[other].part(columns)).unsqueeze(2)
    return rows, _Block(q[..., rows, :], k, v, mask)


def _combined(out: Tensor, logsumexp: Tensor, more: Tensor, more_logsumexp: Tensor) -> tuple[Tensor, Tensor]:
    """Two results over different keys as one over all of them."""
    total = torch.logaddexp(logsumexp, more_logsumexp)
    old, new = ((part - _finite(total)).exp()[..., None] for part in (logsumexp, more_logsumexp))
    return out * old + more * new, total


def _finite(logsumexp: Tensor) -> Tensor:
    """0 instead of -inf, so that what is subtracted from -inf leaves -inf."""
    return logsumexp.masked_fill(logsumexp == -torch.inf, 0)


def _grouped(x: Tensor, groups: int) -> Tensor:
    """(B, s, K R, E) -> (B, K, R, s, E)."""
    return x.unflatten(2, (groups, -1)).movedim(1, 3).contiguous()


def _ungrouped(x: Tensor) -> Tensor:
    """(B, K, R, s, E) -> (B, s, K R, E)."""
    return x.movedim(3, 1).flatten(2, 3)


class _Shift:
    """A tensor on its way to the next rank of the ring, and the previous rank's on its way here."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self._sent, self._received = (
            tensor.contiguous(),
            torch.empty_like(tensor, memory_format=torch.contiguous_format),
        )
        to, of = (dist.get_global_rank(group, other % ranks) for other in (rank + 1, rank - 1))
        send = dist.P2POp(dist.isend, self._sent, to, group)
        receive = dist.P2POp(dist.irecv, self._received, of, group)
        self._works = dist.batch_isend_irecv([send, receive])

    def arrived(self) -> Tensor:
        """The previous rank's; waits for it."""
        for work in self._works:
            work.wait()
        return self._received
