"""Attention by plain batched matrix products, in blocks of queries.

On a CPU with fast bf16 instructions, torch's flash kernel leaves most of them idle at heads of 32 to 128, while batched
products use them. Each block of queries is multiplied with the keys up to the block's end, from the first that is in
the window of one of them, so that little above the diagonal or outside of the window is computed. The query heads of a
group are rows of one product: keys and values are never repeated.

Scores are rounded to the inputs' dtype before the softmax, which computes in float32. In bf16, the errors of results
and gradients are therefore about as large as with torch's flash kernel on the CPU where scores have unit variance, and
twice as large at a deviation of 4.

Forward and backward are custom operators, which `torch.compile` does not trace: the code it would generate for them is
slower.

Shapes: B sequences, S positions, H query heads in K groups of R, E width of a head, V width of its values. Inside there
are N = B K products at once; row s R + r of a product is query head r of the group at position s, so a block of
positions is one of rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forge_plugin_transformer.modules.operator_flops import count_operator
from forge_plugin_transformer.modules.sinks import empty_normalisers, sinks_gradient
from forge_plugin_transformer.scoring import PLAIN, Scoring
from forge_plugin_transformer.torch_internals import softmax_backward_data

BLOCK = 128
"""Positions of a block: of 64 to 512 the fastest at every length measured (128 to 2048)."""
KEEP_UP_TO = 1024
"""Longest sequence whose probabilities are saved for the backward pass. Their memory grows with the square of the
length; beyond this they are recomputed, which costs a quarter more time."""


def gemm_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    scoring: Scoring = PLAIN,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention: q (B, S, H, E), k (B, S, K, E), v (B, S, K, V) -> (B, S, H, V).

    Args:
        q: queries.
        k: keys.
        v: values.
        mask: (B, 1, S, S), true where a position may attend, nowhere above the diagonal or outside of the window; None:
            to all up to itself, within the window.
        scoring: scale, window and cap of scores.
        sinks: (H,) scores without a value, see `forge_plugin_transformer.modules.sinks`.
    """
    # With a cap the backward pass needs the scores, too.
    keep = torch.is_grad_enabled() and k.shape[1] <= KEEP_UP_TO and not scoring.soft_cap
    return _attend(q, k, v, mask, keep, sinks, scoring.window_in(k.shape[1]), scoring.scale, scoring.soft_cap)[0]


@torch.library.custom_op("forge_transformer::gemm_attention", mutates_args=())
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    keep: bool,
    sinks: Tensor | None = None,
    window: int = 0,
    scale: float = 0.0,
    soft_cap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the result, the probabilities of all blocks concatenated, empty unless `keep`, and the normalisers."""
    kept = q.new_empty(kept_size(q, k, window) if keep else 0)
    out, normalisers = attend(q, k, v, mask, kept, Scoring(window, scale, soft_cap), sinks)
    return out, kept, normalisers


@torch.library.custom_op("forge_transformer::gemm_attention_backward", mutates_args=())
def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    kept: Tensor,
    sinks: Tensor | None = None,
    window: int = 0,
    scale: float = 0.0,
    soft_cap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    return attend_backward(grad, q, k, v, mask, kept, Scoring(window, scale, soft_cap), sinks)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    kept: Tensor,
    scoring: Scoring = PLAIN,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`gemm_attention` without gradients. `kept` receives `kept_size` probabilities unless it is empty.

    Returns:
        The result, and with sinks the logarithms of the softmax's normalisers (B, S, H), otherwise an empty tensor.
    """
    # Before q and k are folded, as blocks are computed from the shapes (B, S, …)
    blocks, groups = _blocks(q, k, scoring.window), k.shape[2]
    out = q.new_empty(*q.shape[:2], groups, q.shape[2] // groups, v.shape[3])
    normalisers = empty_normalisers(q, sinks)
    q, k, v = (_fold(tensor, groups) for tensor in (q, k, v))
    for block in blocks:
        p = block.of(kept) if len(kept) else None
        p, sums = _probabilities(q[:, block.rows], k[:, block.keys], block, mask, p, scoring, _by_group(sinks, groups))
        out[:, block.positions] = _by_position(p @ v[:, block.keys], out)
        if sums is not None:
            normalisers[:, block.positions] = _by_position(sums, out).flatten(2)
    return out.flatten(2, 3), normalisers


def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    kept: Tensor,
    scoring: Scoring = PLAIN,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns gradients of q, k and v; the gradients of k and v accumulate over the blocks in float32 or wider."""
    blocks, groups, scale = _blocks(q, k, scoring.window), k.shape[2], scoring.factor(q.shape[3])
    # Contiguous whatever the layout of q, as blocks of positions are written into it by `out`
    grad_q = torch.empty_like(q, memory_format=torch.contiguous_format).unflatten(2, (groups, -1))
    grad, q, k, v = (_fold(tensor, groups) for tensor in (grad, q, k, v))
    # Sums over blocks, which 16 bits would round each time
    grad_k, grad_v = (torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in (k, v))
    by_group = _by_group(sinks, groups)
    for block in blocks:
        rows, keys = block.rows, block.keys
        p = block.of(kept) if len(kept) else None
        if p is None:
            p, _ = _probabilities(q[:, rows], k[:, keys], block, mask, None, scoring, by_group)
        grad_v[:, keys] += p.mT @ grad[:, rows]
        grad_p = grad[:, rows] @ v[:, keys].mT
        # Of the softmax with a sink as well: a sink's value is zero, and so is its share of the sum over keys.
        grad_scores = softmax_backward_data(grad_p, p, -1, p.dtype, grad_input=grad_p)
        if scoring.soft_cap:
            grad_scores *= _slope(q[:, rows], k[:, keys], scoring)
        torch.mul(_by_position(grad_scores @ k[:, keys], grad_q), scale, out=grad_q[:, block.positions])
        grad_k[:, keys] += grad_scores.mT @ q[:, rows]
    # Scaled after the sum over blocks, and rounded once
    grad_k, grad_v = (_unfold(t, groups) for t in (grad_k.mul_(scale).to(k.dtype), grad_v.to(v.dtype)))
    return grad_q.flatten(2, 3), grad_k, grad_v


@_attend.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    _mask: Tensor | None,
    keep: bool,
    sinks: Tensor | None = None,
    window: int = 0,
    *_options: float,
) -> tuple[Tensor, Tensor, Tensor]:
    kept = q.new_empty(kept_size(q, k, window) if keep else 0)
    return q.new_empty(*q.shape[:3], v.shape[3]), kept, empty_normalisers(q, sinks)


@_attend_backward.register_fake
def _(_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, mask, _, sinks, *ctx.options = inputs
    out, kept, normalisers = output
    # The result serves the gradient of sinks alone.
    ctx.save_for_backward(q, k, v, mask, kept, sinks, None if sinks is None else out, normalisers)
    ctx.mark_non_differentiable(kept, normalisers)
    ctx.set_materialize_grads(False)  # else zeros as large as the saved probabilities are allocated for their gradient


def _differentiate(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 9
    q, k, v, mask, kept, sinks, out, normalisers = ctx.saved_tensors
    grads = _attend_backward(grad, q, k, v, mask, kept, sinks, *ctx.options)
    to_sinks = None if sinks is None else sinks_gradient(grad, out, normalisers, sinks)
    return *grads, None, None, to_sinks, None, None, None


_attend.register_autograd(_differentiate, setup_context=_save)
count_operator(
    torch.ops.forge_transformer.gemm_attention, torch.ops.forge_transformer.gemm_attention_backward, windows_at=(6, 7)
)


class _Block(NamedTuple):
    """A block of query positions."""

    positions: slice
    rows: slice
    """Rows of the folded queries."""
    keys: slice
    """Keys up to the block's end, from the first in the window of its first position."""
    kept: slice
    """Range of its probabilities in `kept`."""
    shape: tuple[int, int, int]
    """Shape of its probabilities: (N, rows, keys)."""

    def of(self, kept: Tensor) -> Tensor:
        """Returns its probabilities."""
        return kept[self.kept].view(self.shape)


def _blocks(q: Tensor, k: Tensor, window: int = 0) -> Iterator[_Block]:
    """Yields the blocks of queries q (B, S, H, E) and keys k (B, S, K, E)."""
    batch, length, groups, _ = k.shape
    products, repeats = batch * groups, q.shape[2] // groups
    end = 0
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        first = max(0, start - window + 1) if window else 0
        shape = (products, (stop - start) * repeats, stop - first)
        begin, end = end, end + math.prod(shape)
        rows = slice(start * repeats, stop * repeats)
        yield _Block(slice(start, stop), rows, slice(first, stop), slice(begin, end), shape)


def kept_size(q: Tensor, k: Tensor, window: int = 0) -> int:
    """Returns the number of probabilities of q (B, S, H, E) and k (B, S, K, E) to save."""
    return sum(math.prod(block.shape) for block in _blocks(q, k, window))


def _probabilities(
    q: Tensor,
    k: Tensor,
    block: _Block,
    mask: Tensor | None,
    out: Tensor | None,
    scoring: Scoring,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Softmax of the block's scores: its rows q (N, W R, E) and its keys k (N, T, E) -> (N, W R, T), in `out`.

    Also returns, with sinks (K, R), the logarithms of its normalisers: (N, W R, 1).
    """
    scores = _scores(q, k, scoring, out)
    width = block.positions.stop - block.positions.start
    if mask is None:
        repeats = scores.shape[1] // width
        # Keys end where the block ends, so only the last ones come after some of its positions
        scores[..., -width:] += _later(width, repeats, scores)
        before = block.positions.stop - scoring.window - block.keys.start if scoring.window else 0
        if before > 0:
            scores[..., :before] += _earlier(width, before, repeats, scores)
    else:
        hidden = mask[:, :, block.positions, block.keys].logical_not()
        by_head = scores.unflatten(1, (hidden.shape[2], -1)).unflatten(0, (len(mask), -1))
        by_head.masked_fill_(hidden[:, :, :, None], -torch.inf)
    if sinks is None:
        return torch.softmax(scores, -1, out=scores), None
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    of_rows = sinks.to(wide.dtype).repeat(len(q) // len(sinks), width)
    normalisers = torch.logaddexp(wide.logsumexp(-1), of_rows).unsqueeze(-1)
    # In place: `scores` may be a part of `kept`, from which the backward pass reads it
    return scores.copy_((wide - normalisers).exp_()), normalisers


def _scores(q: Tensor, k: Tensor, scoring: Scoring, out: Tensor | None = None) -> Tensor:
    """Scores of rows q (N, W R, E) with keys k (N, T, E), before any is hidden: (N, W R, T), in `out`."""
    nothing, scale = q.new_empty(1, 1, 1), scoring.factor(q.shape[-1])
    scores = torch.baddbmm(nothing, q, k.mT, beta=0, alpha=scale, out=out)
    return scores.div_(scoring.soft_cap).tanh_().mul_(scoring.soft_cap) if scoring.soft_cap else scores


def _slope(q: Tensor, k: Tensor, scoring: Scoring) -> Tensor:
    """Derivative of capped scores by the scores: (N, W R, T)."""
    # 1 - tanh², where tanh is the capped score divided by the cap
    return 1 - _scores(q, k, scoring).div_(scoring.soft_cap).square_()


def _later(width: int, repeats: int, like: Tensor) -> Tensor:
    """-inf where a key comes after the row's position, else 0: (W R, W)."""
    # Added to scores, which is twice as fast as `masked_fill_`.
    later = torch.full((width, width), -torch.inf, dtype=like.dtype, device=like.device).triu_(1)
    return later.repeat_interleave(repeats, 0)


def _earlier(width: int, keys: int, repeats: int, like: Tensor) -> Tensor:
    """-inf where a key comes before the row's window, else 0: (W R, `keys`).

    The last of these keys is the last one before the window of the last row.
    """
    # Row i of W hides the first `keys` - W + 1 + i: key j if j - i < keys - W + 1.
    earlier = torch.full((width, keys), -torch.inf, dtype=like.dtype, device=like.device).tril_(keys - width)
    return earlier.repeat_interleave(repeats, 0)


def _by_group(sinks: Tensor | None, groups: int) -> Tensor | None:
    """Sinks (H,) -> (K, R)."""
    return None if sinks is None else sinks.unflatten(0, (groups, -1))


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
