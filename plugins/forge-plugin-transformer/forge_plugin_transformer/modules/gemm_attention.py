"""Attention by plain batched matrix products, in blocks of queries.

On a CPU with fast bf16 instructions, torch's flash kernel leaves most of them idle at heads of 32 to 128, while batched
products use them. Each block of queries is multiplied with the keys up to the block's end, so that little above the
diagonal is computed. The query heads of a group are rows of one product: keys and values are never repeated.

Scores are rounded to the inputs' dtype before the softmax, which computes in float32. In bf16 that makes the errors of
results and gradients about those of torch's flash kernel on the CPU where scores have unit variance, and twice those at
a deviation of 4.

Forward and backward are custom operators, which `torch.compile` does not trace: the code it would generate for them is
slower.

Shapes: B sequences, S positions, H query heads in K groups of R, E width of a head, V that of its values. Inside there
are N = B K products at once; row s R + r of a product is query head r of the group at position s, so a block of
positions is one of rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

BLOCK = 128
"""Positions of a block: of 64 to 512 the fastest at every length measured (128 to 2048)."""
KEEP_UP_TO = 1024
"""Longest sequence whose probabilities are saved for the backward pass. Their memory grows with the square of the
length; beyond this they are recomputed, which costs a quarter more time."""


def gemm_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Causal attention: q (B, S, H, E), k (B, S, K, E), v (B, S, K, V) -> (B, S, H, V), scores scaled by E^-0.5.

    Args:
        q: queries.
        k: keys.
        v: values.
        mask: (B, 1, S, S), true where a position may attend, nowhere above the diagonal; None: to all up to itself.
    """
    keep = torch.is_grad_enabled() and k.shape[1] <= KEEP_UP_TO
    return _attend(q, k, v, mask, keep)[0]


@torch.library.custom_op("forge_transformer::gemm_attention", mutates_args=())
def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, keep: bool) -> tuple[Tensor, Tensor]:
    """Returns the result, and the probabilities of all blocks concatenated, empty unless `keep`."""
    kept = q.new_empty(kept_size(q, k) if keep else 0)
    return attend(q, k, v, mask, kept), kept


@torch.library.custom_op("forge_transformer::gemm_attention_backward", mutates_args=())
def _attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kept: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return attend_backward(grad, q, k, v, mask, kept)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kept: Tensor) -> Tensor:
    """`gemm_attention` without gradients. `kept` receives `kept_size` probabilities unless it is empty."""
    blocks, groups = _blocks(q, k), k.shape[2]
    out = q.new_empty(*q.shape[:2], groups, q.shape[2] // groups, v.shape[3])
    q, k, v = (_fold(tensor, groups) for tensor in (q, k, v))
    for block in blocks:
        p = block.of(kept) if len(kept) else None
        p = _probabilities(q[:, block.rows], k[:, block.keys], block, mask, p)
        out[:, block.positions] = _by_position(p @ v[:, block.keys], out)
    return out.flatten(2, 3)


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kept: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns gradients of q, k and v; those of k and v accumulate over the blocks in float32 or wider."""
    blocks, groups, scale = _blocks(q, k), k.shape[2], q.shape[3] ** -0.5
    grad_q = torch.empty_like(q, memory_format=torch.contiguous_format).unflatten(2, (groups, -1))
    grad, q, k, v = (_fold(tensor, groups) for tensor in (grad, q, k, v))
    grad_k, grad_v = (torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in (k, v))
    for block in blocks:
        rows, keys = block.rows, block.keys
        p = block.of(kept) if len(kept) else _probabilities(q[:, rows], k[:, keys], block, mask)
        grad_v[:, keys] += p.mT @ grad[:, rows]
        grad_p = grad[:, rows] @ v[:, keys].mT
        grad_scores = torch._softmax_backward_data(grad_p, p, -1, p.dtype, grad_input=grad_p)
        torch.mul(_by_position(grad_scores @ k[:, keys], grad_q), scale, out=grad_q[:, block.positions])
        grad_k[:, keys] += grad_scores.mT @ q[:, rows]
    grad_k, grad_v = (_unfold(t, groups) for t in (grad_k.mul_(scale).to(k.dtype), grad_v.to(v.dtype)))
    return grad_q.flatten(2, 3), grad_k, grad_v


@_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, _mask: Tensor | None, keep: bool) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(kept_size(q, k) if keep else 0)


@_attend_backward.register_fake
def _(
    _grad: Tensor, q: Tensor, k: Tensor, v: Tensor, _mask: Tensor | None, _kept: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, bool], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:4], output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # else zeros as large as the saved probabilities are allocated for their gradient


def _differentiate(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 5
    return *_attend_backward(grad, *ctx.saved_tensors), None, None


_attend.register_autograd(_differentiate, setup_context=_save)


class _Block(NamedTuple):
    """A block of query positions."""

    positions: slice
    rows: slice
    """Rows of the folded queries."""
    keys: slice
    """Keys up to the block's end."""
    kept: slice
    """Range of its probabilities in `kept`."""
    shape: tuple[int, int, int]
    """Shape of its probabilities: (N, rows, keys)."""

    def of(self, kept: Tensor) -> Tensor:
        """Returns its probabilities."""
        return kept[self.kept].view(self.shape)


def _blocks(q: Tensor, k: Tensor) -> Iterator[_Block]:
    """Yields the blocks of queries q (B, S, H, E) and keys k (B, S, K, E)."""
    batch, length, groups, _ = k.shape
    products, repeats = batch * groups, q.shape[2] // groups
    end = 0
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        shape = (products, (stop - start) * repeats, stop)
        begin, end = end, end + math.prod(shape)
        rows = slice(start * repeats, stop * repeats)
        yield _Block(slice(start, stop), rows, slice(stop), slice(begin, end), shape)


def kept_size(q: Tensor, k: Tensor) -> int:
    """Returns the number of probabilities of q (B, S, H, E) and k (B, S, K, E) to save."""
    return sum(math.prod(block.shape) for block in _blocks(q, k))


def _probabilities(q: Tensor, k: Tensor, block: _Block, mask: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Softmax of the block's scores: its rows q (N, W R, E) and its keys k (N, T, E) -> (N, W R, T), in `out`."""
    nothing, scale = q.new_empty(1, 1, 1), q.shape[-1] ** -0.5
    scores = torch.baddbmm(nothing, q, k.mT, beta=0, alpha=scale, out=out)
    if mask is None:
        width = block.positions.stop - block.positions.start
        scores[..., block.positions] += _later(width, scores.shape[1] // width, scores)
    else:
        hidden = mask[:, :, block.positions, block.keys].logical_not()
        by_head = scores.unflatten(1, (hidden.shape[2], -1)).unflatten(0, (len(mask), -1))
        by_head.masked_fill_(hidden[:, :, :, None], -torch.inf)
    return torch.softmax(scores, -1, out=scores)


def _later(width: int, repeats: int, like: Tensor) -> Tensor:
    """-inf where a key comes after the row's position, else 0: (W R, W)."""
    # Added to scores, which is twice as fast as `masked_fill_`.
    later = torch.full((width, width), -torch.inf, dtype=like.dtype, device=like.device).triu_(1)
    return later.repeat_interleave(repeats, 0)


def _fold(x: Tensor, groups: int) -> Tensor:
    """(B, S, K R, E) -> (B K, S R, E)."""
    return x.unflatten(2, (groups, -1)).transpose(1, 2).flatten(2, 3).flatten(0, 1).contiguous()


def _unfold(x: Tensor, groups: int) -> Tensor:
    """(B K, S, E) -> (B, S, K, E)."""
    return x.unflatten(0, (-1, groups)).transpose(1, 2).contiguous()


def _by_position(rows: Tensor, like: Tensor) -> Tensor:
    """Arranges results (B K, W R, E) of a block like positions of `like` (B, S, K, R, E): (B, W, K, R, E).

    A product cannot write there directly: with results that are not contiguous, torch computes the products of a batch
    one by one, which is slower on two threads than on one.
    """
    groups, repeats = like.shape[2:4]
    return rows.unflatten(1, (-1, repeats)).unflatten(0, (-1, groups)).transpose(1, 2)
