"""The recurrence of Mamba-2 over whole sequences, in chunks (Dao and Gu 2024, arXiv 2405.21060, section 6).

Within a chunk, positions see each other as in attention without a softmax; chunks pass the state on.

Shapes: B sequences, S positions, N chunks of C, G groups of R heads each, H = G R heads, K width of the state, P width
of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from forge_plugin_linear_attention.modules.delta_rule import parts_of_chunks


def state_space(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    step: Tensor,
    rate: Tensor,
    documents: Tensor | None = None,
    state: Tensor | None = None,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """Returns what each position reads, (B, S, H, P), and the state after the last one, (B, G, K, R P).

    The state S of a head becomes exp(-rate step) S + b (step x)ᵀ at each position, which reads Sᵀ c.

    Args:
        x: (B, S, H, P).
        b: (B, S, G, K), where a position writes.
        c: (B, S, G, K), where it reads.
        step: (B, S, H), at least 0; with 0, a position neither writes nor decays.
        rate: (H,), more than 0.
        documents: (B, S), the number of each position's document, ascending; None: all are one.
        state: before the first position, of document 0; None: zeros.
        chunk: C.
    """
    length, groups, width = x.shape[1], b.shape[2], x.shape[3]
    if length == 1 and state is not None:
        return _next_position(x, b, c, step, rate, state)
    chunk = min(chunk, length)
    more = -length % chunk
    if more:  # positions with a step of 0
        x, b, c = (F.pad(tensor, (0, 0, 0, 0, 0, more)) for tensor in (x, b, c))
        step = F.pad(step, (0, 0, 0, more))
    b, c = (tensor.unflatten(1, (-1, chunk)).transpose(2, 3) for tensor in (b, c))  # (B, N, G, C, K)
    step = step.unflatten(2, (groups, -1)).unflatten(1, (-1, chunk)).permute(0, 1, 3, 4, 2)  # (B, N, G, R, C)
    x = x.unflatten(2, (groups, -1)).unflatten(1, (-1, chunk)).permute(0, 1, 3, 4, 2, 5)  # (B, N, G, R, C, P)
    x = x * step[..., None]
    total = (step * -rate.view(groups, -1, 1)).cumsum(-1)  # log of the decay since the chunk began
    earlier = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril()
    seen, before, to_end, through = parts_of_chunks(documents, more, chunk, earlier)
    if before is not None:  # (B, 1, N, …) -> (B, N, 1, 1, …)
        seen, before, to_end, through = (
            part[:, 0, :, None, None] for part in (seen, before, to_end, through) if part is not None
        )
    # Hidden before the exponential: of later positions, it could overflow
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~seen, -torch.inf).exp()
    # Heads of a group share the products of all pairs, and differ in the decay
    within = ((c @ b.mT)[:, :, :, None] * decay) @ x
    until = (total[..., -1:] - total).exp()
    until = until if to_end is None else until * to_end
    stays = total[..., -1].exp()
    stays = stays if through is None else stays * through
    # All heads of a group write at the same place, and read there: one product for all of them
    written = b.mT @ _joined(x * until[..., None])
    first = torch.zeros_like(written[:, 0]) if state is None else state
    states = _states(first, written, stays.repeat_interleave(width, -1)[..., None, :])
    since = total.exp() if before is None else total.exp() * before
    read = (c @ states[:, :-1]).unflatten(-1, (-1, width)) * since.transpose(-1, -2)[..., None]  # (B, N, G, C, R, P)
    mixed = read + within.transpose(3, 4)
    return mixed.transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, :length], states[:, -1]


def _next_position(x: Tensor, b: Tensor, c: Tensor, step: Tensor, rate: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Returns what `state_space` does for one position of the document before it: each operation costs a call."""
    groups = b.shape[2]
    inner = (x * step[..., None]).reshape(len(x), groups, 1, -1)
    stays = (step * -rate).exp()[..., None].expand_as(x).reshape(inner.shape)
    state = torch.addcmul(stays * state, b.reshape(len(b), groups, -1, 1), inner)
    return (c.reshape(len(c), groups, 1, -1) @ state).view_as(x), state


def _joined(x: Tensor) -> Tensor:
    """(B, N, G, R, C, P) -> (B, N, G, C, R P)."""
    return x.transpose(3, 4).flatten(4)


def _states(state: Tensor, written: Tensor, stays: Tensor) -> Tensor:
    """Returns the states before each chunk and after the last one, (B, N + 1, G, K, R P).

    Args:
        state: (B, G, K, R P), before the first chunk.
        written: (B, N, G, K, R P), what each chunk adds.
        stays: (B, N, G, 1, R P), the factor on the state before a chunk.
    """
    states = [state]
    # All at once: the backward pass of an index is as long as the sequence, and there would be one for each chunk
    for added, factor in zip(written.unbind(1), stays.unbind(1), strict=True):
        states.append(torch.addcmul(added, factor, states[-1]))
    return torch.stack(states, 1)
