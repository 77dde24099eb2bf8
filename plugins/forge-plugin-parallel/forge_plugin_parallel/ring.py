"""Causal attention over positions on several ranks, block by block (ring attention, Liu et al. 2023).

A block is the queries of one rank and the keys of one. Blocks are combined from their results and the logarithms of
their softmax's normalisers (logsumexp), as in flash attention, so no rank holds all scores.

Shapes: B sequences, s query positions, t key positions, H query heads, K key/value heads, R = H / K, E width of a head,
V width of its values (at most E).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

SCORES = 2**27
"""Scores that are computed together, 0.5 GB in float32: rows of a block are done one part after the other, as the
scores of a whole block grow with the square of a rank's positions."""


class Mixing(NamedTuple):
    """What `ring` and `all_gather` compute in addition to causal attention, by the names of a mixer's `mixing()`."""

    window: int = 0
    """Positions that one sees at most, itself included; 0: all before it."""
    scale: float = 0.0
    """Factor on products of queries and keys; 0: 1 / sqrt(E)."""
    soft_cap: float = 0.0
    """c > 0: scores are c tanh(score / c)."""
    sinks: bool = False
    """Whether each query head has a score that takes part in the softmax and has no value."""
    mask: Any = None
    """Its `sees(query, key)` returns where positions of a document, counted from its start, see each other."""

    def scores(self, products: Tensor, width: int) -> Tensor:
        """Scores of products of queries and keys of this width, before any is masked; changes `products`."""
        scores = products.mul_(self.scale or width**-0.5)
        return scores.div_(self.soft_cap).tanh_() * self.soft_cap if self.soft_cap else scores


PLAIN = Mixing()


class RankPositions(NamedTuple):
    """Positions that a rank holds, in its order."""

    positions: Tensor
    """(s,) indices into the sequence."""
    documents: Tensor | None
    """(B, s) number of each position's document; None: a sequence is one document."""
    starts: Tensor | None = None
    """(B, s) index of the first position of each one's document; None: as `documents`."""

    def part(self, rows: slice) -> RankPositions:
        """Returns a slice of these positions."""
        documents, starts = (None if entry is None else entry[:, rows] for entry in (self.documents, self.starts))
        return RankPositions(self.positions[rows], documents, starts)

    def in_documents(self) -> Tensor:
        """Returns how many positions of its document come before each: (B or 1, s)."""
        return self.positions[None] if self.starts is None else self.positions - self.starts

    @classmethod
    def concatenate(cls, parts: Sequence[RankPositions]) -> RankPositions:
        """Returns the positions of several ranks, in the order of the ranks."""
        entries = ([part.documents for part in parts], [part.starts for part in parts])
        documents, starts = (None if None in entry else torch.cat(entry, 1) for entry in entries)  # type: ignore[arg-type]
        return cls(torch.cat([part.positions for part in parts]), documents, starts)


def visible(queries: RankPositions, keys: RankPositions, mixing: Mixing = PLAIN) -> Tensor:
    """Returns a mask (B or 1, 1, s, t), true where a query sees a key.

    It sees none after it, none before its window or hidden by its mask, if there are any, and none of another document.
    """
    mask = (queries.positions[:, None] >= keys.positions)[None, None]
    if mixing.window:
        mask = mask & (queries.positions[:, None] - mixing.window < keys.positions)
    if mixing.mask is not None:
        seen = mixing.mask.sees(queries.in_documents()[:, :, None], keys.in_documents()[:, None, :])
        # A query sees itself under any mask: a softmax over nothing is no number
        mask = mask & (seen | (queries.positions[:, None] == keys.positions))[:, None]
    if queries.documents is None or keys.documents is None:
        return mask
    return mask & (queries.documents[:, None, :, None] == keys.documents[:, None, None, :])


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: RankPositions,
    keys: RankPositions,
    mixing: Mixing = PLAIN,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of a rank's queries over keys and values that are all on this rank.

    Args:
        q: queries (B, s, H, E).
        k: keys (B, t, K, E).
        v: values (B, t, K, V).
        queries: positions of `q`.
        keys: positions of `k` and `v`.
        mixing: what else there is to compute.
        sinks: (H,), with `mixing.sinks`.

    Returns:
        (B, s, H, V), in the dtype of `q`.
    """
    mask = visible(queries, keys, mixing)
    if mixing.soft_cap or sinks is not None:
        return _by_definition(q, k, v, mask, mixing, sinks)
    width = v.shape[-1]
    if width < k.shape[-1]:  # torch's fast kernels require values as wide as keys
        v = F.pad(v, (0, k.shape[-1] - width))
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    if q.shape[1] != k.shape[1]:
        k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], 1) for tensor in (k, v))
    scale = mixing.scale or None
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale)[..., :width].transpose(1, 2)


def _by_definition(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, mixing: Mixing, sinks: Tensor | None) -> Tensor:
    """`attend` for what torch's kernels do not compute."""
    keys, values = (tensor.transpose(1, 2).unsqueeze(2) for tensor in (k, v))
    block = _Block(_grouped(q, k.shape[2]), keys, values, mask.unsqueeze(2), mixing)
    scores = block.masked(block.scores())
    columns = [] if sinks is None else [_by_group(sinks, k.shape[2], scores.dtype).expand(*scores.shape[:-1], 1)]
    weights = torch.cat([scores, *columns], -1).softmax(-1)[..., : k.shape[1]]
    return _ungrouped(weights.to(v.dtype) @ block.v)


def _by_group(sinks: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """Sinks (K R,) -> (1, K, R, 1, 1)."""
    return sinks.to(dtype).view(1, groups, -1, 1, 1)


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranks: Sequence[RankPositions],
    group: dist.ProcessGroup,
    mixing: Mixing = PLAIN,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of this rank's queries over the keys and values of all ranks. Collective.

    Keys and values are sent around the ring of ranks; the next block is received while one is computed. The backward
    pass sends them around again, together with their gradients.

    Args:
        q: this rank's queries (B, s, H, E).
        k: this rank's keys (B, s, K, E).
        v: this rank's values (B, s, K, V).
        ranks: positions of each rank of `group`, laid out as `_blocks` expects.
        group: the ranks that share the sequence.
        mixing: what else there is to compute.
        sinks: (H,), with `mixing.sinks`; their gradient covers this rank's queries.

    Returns:
        (B, s, H, V), in the dtype of `q`.
    """
    return _Ring.apply(q, k, v, sinks, list(ranks), group, mixing)  # type: ignore[no-untyped-call]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        positions: list[RankPositions],
        group: dist.ProcessGroup,
        mixing: Mixing,
    ) -> Tensor:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        queries = _grouped(q, k.shape[2])
        # Each block rescales the results before it, which 16 bits would round each time
        wide = torch.promote_types(q.dtype, torch.float32)
        out = queries.new_zeros((*queries.shape[:-1], v.shape[-1]), dtype=wide)
        logsumexp = queries.new_full(queries.shape[:-1], -torch.inf, dtype=wide)
        here = torch.cat([k, v], -1)  # one message a turn for both
        for turn in range(ranks):
            # Sent before the block is computed, so that communication overlaps; the last turn needs no other block.
            coming = _Shift(here, group) if turn < ranks - 1 else None
            other = (rank - turn) % ranks
            if _is_seen(rank, other, ranks, q.shape[1] // 2, mixing.window):
                for rows, block in _blocks(queries, here, positions, rank, other, mixing):
                    combined = _combined(out[..., rows, :], logsumexp[..., rows], *block.forward())
                    out[..., rows, :], logsumexp[..., rows] = combined
            here = coming.arrived() if coming is not None else here
        if sinks is not None:  # as one more block, of values 0
            column = _by_group(sinks, k.shape[2], wide).squeeze(-1).expand_as(logsumexp)
            out, logsumexp = _combined(out, logsumexp, torch.zeros_like(out), column)
        ctx.save_for_backward(q, k, v, out, logsumexp, sinks)
        ctx.positions, ctx.group, ctx.mixing = positions, group, mixing
        return _ungrouped(out).to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, logsumexp, sinks = ctx.saved_tensors
        positions, group = ctx.positions, ctx.group
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        queries, grad = _grouped(q, k.shape[2]), _grouped(grad, k.shape[2]).to(out.dtype)
        weighted = (grad * out).sum(-1)  # the softmax's correction, from the result of all blocks together
        to_q, here = torch.zeros_like(queries, dtype=out.dtype), torch.cat([k, v], -1)
        to_here = torch.zeros_like(here, dtype=out.dtype)
        for turn in range(ranks):
            coming = _Shift(here, group) if turn < ranks - 1 else None
            other = (rank - turn) % ranks
            if _is_seen(rank, other, ranks, q.shape[1] // 2, ctx.mixing.window):
                for rows, block in _blocks(queries, here, positions, rank, other, ctx.mixing):
                    parts = block.backward(grad[..., rows, :], logsumexp[..., rows], weighted[..., rows])
                    to_q[..., rows, :] += parts[0]
                    to_here[:, : block.k.shape[-2]] += torch.cat(parts[1:], -1)
            # Moves with its keys, and once more in the last turn, so that it ends on the rank they came from.
            to_here = _Shift(to_here, group).arrived()
            here = coming.arrived() if coming is not None else here
        to_k, to_v = to_here.to(k.dtype).split([k.shape[-1], v.shape[-1]], -1)
        to_sinks = None if sinks is None else _sinks_gradient(sinks, logsumexp, weighted)
        return _ungrouped(to_q).to(q.dtype), to_k, to_v, to_sinks, None, None, None


def _sinks_gradient(sinks: Tensor, logsumexp: Tensor, weighted: Tensor) -> Tensor:
    """Gradient (H,) of sinks, from `logsumexp` and `weighted` (B, K, R, s), see `_Block.backward`."""
    share = (_by_group(sinks, logsumexp.shape[1], logsumexp.dtype).squeeze(-1) - logsumexp).exp_()
    return -(share * weighted).sum((0, 3)).flatten().to(sinks.dtype)


class _Block(NamedTuple):
    """Queries of one rank, keys and values of one (the same or another)."""

    q: Tensor
    """(B, K, R, s, E)."""
    k: Tensor
    """(B, K, 1, t, E)."""
    v: Tensor
    """(B, K, 1, t, V)."""
    mask: Tensor
    """(B or 1, 1, 1, s, t) bool."""
    mixing: Mixing = PLAIN

    def forward(self) -> tuple[Tensor, Tensor]:
        """Returns the result (B, K, R, s, V) and logsumexp (B, K, R, s): -inf where a query sees no key of it."""
        scores = self.masked(self.scores())
        logsumexp = scores.logsumexp(-1)
        return (scores - _finite(logsumexp)[..., None]).exp_().to(self.v.dtype) @ self.v, logsumexp

    def backward(self, grad: Tensor, logsumexp: Tensor, weighted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns gradients of q (B, K, R, s, E), k (B, t, K, E) and v (B, t, K, V).

        Args:
            grad: (B, K, R, s, V), gradient of the result.
            logsumexp: (B, K, R, s), over the keys of all blocks.
            weighted: (B, K, R, s), sum over V of gradient x result of all blocks.
        """
        scores, cap = self.scores(), self.mixing.soft_cap
        slope = 1 - (scores / cap).square_() if cap else None
        share = (self.masked(scores) - logsumexp[..., None]).exp_()
        wide = share.dtype
        # Query heads of a group share keys and values, so their gradients add up
        to_v = (share.mT @ grad).sum(2)
        # Of a softmax p: p (dp - Σ p dp), whose sum over all keys is `weighted`
        to_scores = share.mul_(grad @ self.v.to(wide).mT - weighted[..., None])
        to_scores.mul_(self.mixing.scale or self.q.shape[-1] ** -0.5)
        if slope is not None:
            to_scores.mul_(slope)
        to_q, to_k = to_scores @ self.k.to(wide), (to_scores.mT @ self.q.to(wide)).sum(2)
        return to_q, to_k.transpose(1, 2), to_v.transpose(1, 2)

    def scores(self) -> Tensor:
        """(B, K, R, s, t) in float32 or wider, of all pairs."""
        wide = torch.promote_types(self.q.dtype, torch.float32)
        return self.mixing.scores((self.q @ self.k.mT).to(wide), self.q.shape[-1])

    def masked(self, scores: Tensor) -> Tensor:
        """The same with -inf where a query does not see a key, in place."""
        return scores.masked_fill_(~self.mask, -torch.inf)


def _is_seen(rank: int, other: int, ranks: int, length: int, window: int) -> bool:
    """Whether a query of `rank` has a key of `other` in its window; each has two chunks of `length` positions."""
    if not window:
        return True
    queries, keys = ((chunk, 2 * ranks - 1 - chunk) for chunk in (rank, other))
    # From the first query of a chunk to the last key of an earlier one.
    nearest = [(q - k - 1) * length + 1 for q in queries for k in keys if q > k]
    return rank == other or any(distance < window for distance in nearest)


def _blocks(
    q: Tensor, kv: Tensor, positions: Sequence[RankPositions], rank: int, other: int, mixing: Mixing
) -> Iterator[tuple[slice, _Block]]:
    """Yields rows of queries and their block, without halves that causality masks, of at most `SCORES` scores each.

    A block has queries (B, K, R, s, E) of `rank` and keys and values (B, s, K, E + V) of `other`.

    Each rank holds a chunk from the front of the sequence and its mirror image from the back. All queries see the front
    chunk of an earlier rank and nothing else of it; only the queries in the back chunk see a later rank, all of it.
    """
    length = q.shape[-2]
    rows = slice(length // 2, length) if other > rank else slice(length)
    columns = slice(length // 2 if other < rank else length)
    width = q.shape[-1]
    k, v = kv[:, columns].transpose(1, 2).unsqueeze(2).split([width, kv.shape[-1] - width], -1)
    together = max(1, SCORES // (q[..., 0, 0].numel() * k.shape[-2]))
    for start in range(rows.start or 0, rows.stop, together):
        part = slice(start, min(start + together, rows.stop))
        mask = visible(positions[rank].part(part), positions[other].part(columns), mixing).unsqueeze(2)
        yield part, _Block(q[..., part, :], k, v, mask, mixing)


def _combined(out: Tensor, logsumexp: Tensor, more: Tensor, more_logsumexp: Tensor) -> tuple[Tensor, Tensor]:
    """Combine results over two sets of keys into the result and logsumexp over both."""
    total = torch.logaddexp(logsumexp, more_logsumexp)
    old, new = ((part - _finite(total)).exp()[..., None] for part in (logsumexp, more_logsumexp))
    return out * old + more * new, total


def _finite(logsumexp: Tensor) -> Tensor:
    """Replaces -inf by 0: -inf - (-inf) would be NaN where a query sees no key."""
    return logsumexp.masked_fill(logsumexp == -torch.inf, 0)


def _grouped(x: Tensor, groups: int) -> Tensor:
    """(B, s, K R, E) -> (B, K, R, s, E)."""
    return x.unflatten(2, (groups, -1)).movedim(1, 3).contiguous()


def _ungrouped(x: Tensor) -> Tensor:
    """(B, K, R, s, E) -> (B, s, K R, E)."""
    return x.movedim(3, 1).flatten(2, 3)


class _Shift:
    """Sends a tensor to the next rank of the ring while receiving the previous rank's."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self._sent = tensor.contiguous()  # an attribute, so that it is not freed while it is being sent
        self._received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        to, source = (dist.get_global_rank(group, other % ranks) for other in (rank + 1, rank - 1))
        send = dist.P2POp(dist.isend, self._sent, to, group)
        receive = dist.P2POp(dist.irecv, self._received, source, group)
        # Both in one batch: separate blocking sends around a ring would wait for each other.
        self._works = dist.batch_isend_irecv([send, receive])

    def arrived(self) -> Tensor:
        """Waits for the previous rank's tensor and returns it."""
        for work in self._works:
            work.wait()
        return self._received
