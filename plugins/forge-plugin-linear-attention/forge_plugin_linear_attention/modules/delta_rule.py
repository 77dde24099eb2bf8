"""The gated delta rule over whole sequences, in chunks.

Within a chunk, what each position writes depends on what earlier ones wrote: a triangular system (Yang et al. 2024,
"Parallelizing Linear Transformers with the Delta Rule over Sequence Length", section 3.2, there without decay). Chunks
pass the state on one after the other.

Shapes: B sequences, H heads, S positions, N chunks of C, K width of keys, V width of values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    documents: Tensor | None = None,
    state: Tensor | None = None,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """Returns what each position reads, (B, H, S, V), and the state after the last one, (B, H, K, V).

    Args:
        q: (B, H, S, K), with any factor on the output.
        k: (B, H, S, K), of length 1 or 0.
        v: (B, H, S, V).
        log_decay: (B, H, S), log α ≤ 0.
        beta: (B, H, S), between 0 and 1.
        documents: (B, S), the number of each position's document, ascending; None: all are one.
        state: (B, H, K, V) before the first position, of document 0; None: zeros.
        chunk: C.
    """
    length = q.shape[2]
    chunk = min(chunk, length)
    more = -length % chunk
    if more:  # positions that write nothing and do not decay
        q, k, v = (F.pad(x, (0, 0, 0, more)) for x in (q, k, v))
        log_decay, beta = F.pad(log_decay, (0, more)), F.pad(beta, (0, more))
    q, k, v, log_decay, beta = (x.unflatten(2, (-1, chunk)) for x in (q, k, v, log_decay, beta))
    total = log_decay.cumsum(-1)  # (B, H, N, C): log of the decay since the chunk began
    earlier = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    seen, before, to_end, through = parts_of_chunks(documents, more, chunk, earlier)
    # Hidden before the exponential: of later positions, it could overflow
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~seen, -torch.inf).exp()
    system = (beta[..., None] * (k @ k.mT) * decay).tril(-1)
    since = total.exp() if before is None else total.exp() * before
    values, reads = solved(system, beta[..., None] * v, (beta * since)[..., None] * k)
    scores, queries = (q @ k.mT) * decay, q * since[..., None]
    until = (total[..., -1:] - total).exp()
    left = total[..., -1].exp()[..., None, None]
    keys = k * (until if to_end is None else until * to_end)[..., None]
    left = left if through is None else left * through[..., None, None]
    if state is None:
        state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    outputs = []
    # All at once: the backward pass of an index is as long as the sequence, and there would be one for each chunk
    chunks = (x.unbind(2) for x in (values, reads, queries, scores, left, keys))
    for value, read, query, score, stays, key in zip(*chunks, strict=True):
        written = value - read @ state
        outputs.append(query @ state + score @ written)
        state = stays * state + key.mT @ written
    return torch.cat(outputs, 2)[:, :, :length], state


def solved(system: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (I + system)⁻¹ times two tensors (…, C, V) and (…, C, K), of a strictly lower triangular (…, C, C)."""
    both: tuple[Tensor, Tensor] = _Solved.apply(system, first, second)  # type: ignore[no-untyped-call]
    return both


class _Solved(torch.autograd.Function):
    """Products with the inverse, which the backward pass needs once more.

    Solving for the columns of both tensors, and in the backward pass for their gradients, takes 1.7 times as long. The
    inverse is bounded, as it is a part of products of I - β k kᵀ, none of which makes a vector longer.
    """

    @staticmethod
    def forward(ctx: Any, system: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        identity = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device).expand_as(system)
        inverse = torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True)
        products = inverse @ first, inverse @ second
        ctx.save_for_backward(inverse, *products)
        return products

    @staticmethod
    # The gradient has none itself: a second derivative is an error, and not wrong
    @once_differentiable
    def backward(ctx: Any, of_first: Tensor, of_second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inverse, first, second = ctx.saved_tensors
        of_first, of_second = inverse.mT @ of_first, inverse.mT @ of_second
        return -(of_first @ first.mT + of_second @ second.mT), of_first, of_second


def parts_of_chunks(
    documents: Tensor | None, more: int, chunk: int, earlier: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Returns what documents leave of a chunk.

    Returns:
        seen: (C, C) or (B, 1, N, C, C), whether a position sees another one of its chunk.
        before: (B, 1, N, C), whether it sees the state before its chunk.
        to_end: (B, 1, N, C), whether the state after its chunk has it.
        through: (B, 1, N), whether the state before a chunk goes through all of it.
    """
    if documents is None:
        return earlier, None, None, None
    # The last document goes on, so that the state after the padding is its own
    numbers = torch.cat([documents, documents[:, -1:].expand(-1, more)], 1).unflatten(1, (-1, chunk))[:, None]
    last = numbers[..., -1]  # (B, 1, N)
    # The state before the first chunk belongs to document 0
    previous = F.pad(last[..., :-1], (1, 0))
    seen = earlier & (numbers[..., :, None] == numbers[..., None, :])
    return seen, numbers == previous[..., None], numbers == last[..., None], last == previous
