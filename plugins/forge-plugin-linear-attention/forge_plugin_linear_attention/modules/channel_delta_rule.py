"""The delta rule with a decay for each feature of the keys, over whole sequences, in chunks.

As `delta_rule`, where each feature of a key has a separate rate: within a chunk, the product of two keys, or of a query
and a key, is a sum over features of which each decayed by another factor between the two positions (Kimi Team 2025,
"Kimi Linear", arXiv 2510.26692, section 3.2). A chunk consists of blocks. For positions of two different ones, that
factor is split at the beginning of the later block, so that the sum is a matrix product of which no factor exceeds 1.
Within a block, it is computed for each pair of positions.

Shapes: B sequences, H heads, S positions, N chunks of C, each of M blocks of c, K width of keys, V width of values.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from forge_plugin_linear_attention.modules.delta_rule import parts_of_chunks, solved

BLOCK = 8
"""c, where it divides the chunk. Pairs within a block cost c K numbers for each position, and decayed keys C / c K: for
a chunk of 32, CPUs take half more time with 4 or 16."""


def channel_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    documents: Tensor | None = None,
    state: Tensor | None = None,
    chunk: int = 32,
) -> tuple[Tensor, Tensor]:
    """Returns what each position reads, (B, H, S, V), and the state after the last one, (B, H, K, V).

    Args:
        q: (B, H, S, K), with any factor on the output.
        k: (B, H, S, K), of length 1 or 0.
        v: (B, H, S, V).
        log_decay: (B, H, S, K), log α ≤ 0.
        beta: (B, H, S), between 0 and 1.
        documents: (B, S), the number of each position's document, ascending; None: all are one.
        state: (B, H, K, V) before the first position, of document 0; None: zeros.
        chunk: C.
    """
    length = q.shape[2]
    if length < chunk:  # one chunk, of whole blocks
        chunk = length if length <= BLOCK else -(-length // BLOCK) * BLOCK
    more = -length % chunk
    if more:  # positions that write nothing and do not decay
        q, k, v, log_decay = (F.pad(x, (0, 0, 0, more)) for x in (q, k, v, log_decay))
        beta = F.pad(beta, (0, more))
    q, k, v, log_decay, beta = (x.unflatten(2, (-1, chunk)) for x in (q, k, v, log_decay, beta))
    total = log_decay.cumsum(-2)  # (B, H, N, C, K): log of the decay since the chunk began
    earlier = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    seen, before, to_end, through = parts_of_chunks(documents, more, chunk, earlier)
    of_keys, scores = (products * seen for products in _decayed_products((k, q), k, total))
    # Strictly below the diagonal, as a position corrects what earlier ones wrote; the diagonal is 1, and implied
    system = (beta[..., None] * of_keys).tril(-1)
    since = total.exp() if before is None else total.exp() * before[..., None]
    values, reads = solved(system, beta[..., None] * v, beta[..., None] * since * k)
    until = (total[..., -1:, :] - total).exp()
    keys = k * (until if to_end is None else until * to_end[..., None])
    left = total[..., -1, :, None].exp()  # (B, H, N, K, 1)
    left = left if through is None else left * through[..., None, None]
    if state is None:
        state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    outputs = []
    # All at once: the backward pass of an index is as long as the sequence, and there would be one for each chunk
    chunks = (x.unbind(2) for x in (values, reads, q * since, scores, left, keys))
    for value, read, query, score, stays, key in zip(*chunks, strict=True):
        written = value - read @ state
        outputs.append(query @ state + score @ written)
        state = stays * state + key.mT @ written
    return torch.cat(outputs, 2)[:, :, :length], state


def _decayed_products(rows: tuple[Tensor, ...], k: Tensor, total: Tensor) -> list[Tensor]:
    """Returns Σ x_i exp(total_i - total_j) k_j over features for each x of `rows`, (B, H, N, C, C), 0 for j > i.

    Args:
        rows: each (B, H, N, C, K).
        k: (B, H, N, C, K).
        total: (B, H, N, C, K), descending along C.
    """
    chunk = k.shape[-2]
    width = math.gcd(chunk, BLOCK)
    count = chunk // width
    blocks = total.unflatten(-2, (count, width))  # (…, M, c, K)
    within = (blocks[..., :, None, :] - blocks[..., None, :, :]).masked_fill(
        # Hidden before the exponential: of later positions, it could overflow
        ~torch.ones(width, width, dtype=torch.bool, device=k.device).tril()[..., None],
        -torch.inf,
    )
    pairs = within.exp() * k.unflatten(-2, (count, width))[..., None, :, :]  # (…, M, c, c, K)
    inside = [torch.einsum("...ik,...ijk->...ij", x.unflatten(-2, (count, width)), pairs) for x in rows]
    if count == 1:
        return [products[..., 0, :, :] for products in inside]
    start = F.pad(blocks[..., :-1, -1, :], (0, 0, 1, 0))  # (…, M, K): total before each block
    places = torch.arange(chunk, device=k.device)
    later = places >= width * torch.arange(count, device=k.device)[:, None]  # (M, C): not before the block
    until = (start[..., :, None, :] - total[..., None, :, :]).masked_fill(later[..., None], -torch.inf).exp()
    keys = k[..., None, :, :] * until  # (…, M, C, K)
    since = (blocks - start[..., None, :]).exp()
    diagonal = torch.eye(count, dtype=k.dtype, device=k.device)[:, None, :, None]  # (M, 1, M, 1)
    products = []
    for x, own in zip(rows, inside, strict=True):
        across = (x.unflatten(-2, (count, width)) * since) @ keys.mT  # (…, M, c, C)
        placed = (own[..., :, :, None, :] * diagonal).flatten(-2)  # (…, M, c, C)
        products.append((across + placed).flatten(-3, -2))
    return products
