"""Attention within documents and windows on the CPU, part by part, so that little else is computed.

A segment is a whole document, or several short neighbours, which share one call with a small mask, since each call
costs about as much as the attention of a hundred positions. With a window, the flash kernel computes a long document in
blocks of queries, each with the keys in their windows; `gemm` has such blocks anyway.

Forward and backward are custom operators: document boundaries differ from batch to batch, so `torch.compile` must not
trace the loop over segments.

Shapes: B sequences, S positions, H query heads, K key/value heads, E width of a head, V width of its values,
W positions of a segment, T positions of its keys. With documents, all rows are concatenated, and B is 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from forge_kit.torch_internals import flash_on_cpu, flash_on_cpu_backward
from forge_plugin_transformer.modules import gemm_attention
from forge_plugin_transformer.modules.documents import document_starts, mask_of
from forge_plugin_transformer.modules.narrow_values import narrowed, padded
from forge_plugin_transformer.modules.operator_flops import count_operator
from forge_plugin_transformer.modules.sinks import add_sinks, empty_normalisers, sinks_gradient
from forge_plugin_transformer.scoring import PLAIN, Scoring

TOGETHER = 128
"""Neighbouring documents of at most this total length make one segment: of 64, 128 and 256 about the fastest for
documents of 8 to 64."""
WINDOW_BLOCK = 256
"""Queries of a block of the flash kernel with a window, at least; a longer window has blocks of its length."""


def segment_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    document_ids: Tensor | None,
    kernel: Literal["flash", "gemm"],
    scoring: Scoring = PLAIN,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention within each document: q (B, S, H, E), k (B, S, K, E), v (B, S, K, V) -> (B, S, H, V).

    Args:
        q: queries.
        k: keys.
        v: values.
        document_ids: (B, S), equal where neighbours are of one document; None: each row is one.
        kernel: kernel of the segments.
        scoring: window and scale, and for `gemm` the cap of scores.
        sinks: (H,) scores without a value, see `forge_plugin_transformer.modules.sinks`.
    """
    width, v = v.shape[-1], padded(v, k, kernel)
    # As numbers, since the schema of a custom operator has no type for `Scoring`
    options = scoring.window_in(q.shape[1]), scoring.scale, scoring.soft_cap
    # With a cap the backward pass needs the scores, too, and recomputes both
    keep = torch.is_grad_enabled() and not scoring.soft_cap
    return narrowed(_attend(q, k, v, document_ids, kernel, keep, sinks, *options)[0], width)


class Segment(NamedTuple):
    """A range of queries, and one of the keys that they may attend to."""

    positions: slice
    keys: slice
    """Ends where `positions` end."""
    mask: Tensor | None
    """(1, 1, W, T) bool, true where a position may attend; None: to all up to itself, and T is W."""


def segments(document_ids: Tensor, window: int = 0, block: int = 0) -> Iterator[Segment]:
    """Yields the segments that cover all rows, in order; positions refer to the concatenation of all rows.

    Args:
        document_ids: (B, S).
        window: the window of `Scoring`, 0 for none; masks hide positions outside of it.
        block: queries of one segment at most, in documents longer than the window; 0: no limit, and the kernel sees to
            the window where the mask is None.
    """
    starts = document_starts(document_ids).flatten()
    numbers = starts.cumsum(0)
    for start, stop, documents in _grouped([*starts.nonzero().flatten().tolist(), len(starts)]):
        if documents > 1:
            inside = slice(start, stop)
            yield Segment(inside, inside, mask_of(numbers[inside], window)[None, None])
        else:
            yield from in_blocks(start, stop, window, block, starts.device)


def in_blocks(start: int, stop: int, window: int, block: int, device: torch.device) -> Iterator[Segment]:
    """Yields the segments of one document, from `start` to `stop`; see `segments`."""
    if not block or not 0 < window < stop - start:
        yield Segment(slice(start, stop), slice(start, stop), None)
        return
    for begin in range(start, stop, block):
        end, first = min(begin + block, stop), max(start, begin - window + 1)
        # True of a first block only, as blocks are not shorter than the window: plain causal attention
        mask = None if end - start <= window else _band(end - begin, end - first, window, device)
        yield Segment(slice(begin, end), slice(first, end), mask)


def _band(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """Mask (1, 1, W, T) of the last W of T positions, within the window."""
    before = keys - queries
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device)
    return mask.tril_(before).triu_(before + 1 - window)[None, None]


def _grouped(bounds: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yields (start, stop, number of documents) between bounds, with short neighbours joined."""
    start = stop = documents = 0
    for begin, end in pairwise(bounds):
        if documents and end - start > TOGETHER:
            yield start, stop, documents
            start, documents = begin, 0
        stop, documents = end, documents + 1
    yield start, stop, documents


class SegmentKernel(Protocol):
    """Attention of one segment: q (B, W, H, E), k (B, T, K, E), v (B, T, K, V) -> (B, W, H, V)."""

    def block(self, window: int) -> int:
        """Returns how many queries a segment of a long document has at most; 0: it has all, and windows are kept."""

    def kept_size(self, q: Tensor, k: Tensor, window: int) -> int:
        """Returns the number of elements to save for the backward pass."""

    def kept(self, q: Tensor) -> Tensor:
        """Allocates the saved elements of all segments of q (B, S, H, E)."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        kept: Tensor,
        scoring: Scoring,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Computes a segment, and writes its saved elements into `kept`, unless that is empty.

        Also returns, with sinks, the logarithms of the softmax's normalisers (B, W, H).
        """

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        mask: Tensor | None,
        kept: Tensor,
        scoring: Scoring,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns gradients of q, k and v."""


class Flash:
    """torch's flash kernel; saves the logarithm of each softmax's normaliser."""

    def block(self, window: int) -> int:
        """Smaller blocks than a window would leave out more of the pairs outside of it, and need more calls."""
        return max(window, WINDOW_BLOCK)

    def kept_size(self, q: Tensor, k: Tensor, window: int) -> int:
        """One number for each query and head: W x H of each of the B rows."""
        return q.shape[:3].numel()

    def kept(self, q: Tensor) -> Tensor:
        """Allocates one number for each query and head, float32 or wider, as the kernel returns them."""
        return q.new_empty(q.shape[:3].numel(), dtype=torch.promote_types(q.dtype, torch.float32))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        kept: Tensor,
        scoring: Scoring,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """With sinks, scales the kernel's result (`add_sinks`), and saves the normalisers that include them."""
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        out, sums = flash_on_cpu(
            q, k, v, is_causal=mask is None, attn_mask=_additive(mask, q), scale=scoring.given_scale
        )
        out, normalisers = out.transpose(1, 2), sums.transpose(1, 2)
        if sinks is not None:
            out, normalisers = add_sinks(out, normalisers, sinks)
        # Empty unless a backward pass follows
        if len(kept):
            kept.view(q.shape[:3]).copy_(normalisers.transpose(1, 2))
        return out, normalisers

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        mask: Tensor | None,
        kept: Tensor,
        scoring: Scoring,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Needs no special case for sinks, as `out` and the saved normalisers include them."""
        grad, q, k, v, out = (tensor.transpose(1, 2) for tensor in (grad, q, k, v, out))
        normalisers, causal, additive = kept.view(q.shape[:3]), mask is None, _additive(mask, q)
        grads = flash_on_cpu_backward(
            grad, q, k, v, out, normalisers, 0.0, causal, attn_mask=additive, scale=scoring.given_scale
        )
        grad_q, grad_k, grad_v = (tensor.transpose(1, 2) for tensor in grads)
        return grad_q, grad_k, grad_v


def _additive(mask: Tensor | None, like: Tensor) -> Tensor | None:
    if mask is None:
        return None
    # Called directly, the kernel takes masks that are added; torch converts bool ones a level above it
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask.logical_not(), -torch.inf)


class Gemm:
    """Blocks of plain matrix products; saves the probabilities of segments that are not too long."""

    def block(self, window: int) -> int:
        """None: it divides long segments itself, and its blocks stay within the window."""
        return 0

    def kept_size(self, q: Tensor, k: Tensor, window: int) -> int:
        """The probabilities that its blocks compute; 0 for segments longer than `KEEP_UP_TO`."""
        return gemm_attention.kept_size(q, k, window) if q.shape[1] <= gemm_attention.KEEP_UP_TO else 0

    def kept(self, q: Tensor) -> Tensor:
        """Allocates enough for any division into segments; only pages that are written take memory."""
        longest = min(max(q.shape[1], TOGETHER), gemm_attention.KEEP_UP_TO)  # short rows are joined too
        return q.new_empty(q.shape[:3].numel() * longest)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        kept: Tensor,
        scoring: Scoring,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Saves the probabilities; with an empty `kept`, the backward pass recomputes them."""
        return gemm_attention.attend(q, k, v, mask, kept, scoring, sinks)

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        mask: Tensor | None,
        kept: Tensor,
        scoring: Scoring,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Does not read `out`: the probabilities are enough, saved or recomputed."""
        return gemm_attention.attend_backward(grad, q, k, v, mask, kept, scoring, sinks)


KERNELS: Mapping[str, SegmentKernel] = {"flash": Flash(), "gemm": Gemm()}


def _segments(q: Tensor, document_ids: Tensor | None, kernel: str, window: int) -> Iterator[Segment]:
    block = KERNELS[kernel].block(window)
    if document_ids is None:
        return in_blocks(0, q.shape[1], window, block, q.device)
    return segments(document_ids, window, block)


def _joined(document_ids: Tensor | None, *tensors: Tensor) -> list[Tensor]:
    """Concatenates the rows of tensors (B, S, …), each row with its own bounds: (1, B S, …), contiguous."""
    if document_ids is None:
        return [tensor.contiguous() for tensor in tensors]
    return [tensor.contiguous().flatten(0, 1)[None] for tensor in tensors]


@torch.library.custom_op("forge_transformer::segment_attention", mutates_args=())
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    document_ids: Tensor | None,
    kernel: str,
    keep: bool,
    sinks: Tensor | None = None,
    window: int = 0,
    scale: float = 0.0,
    soft_cap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the result, the saved elements of all segments concatenated (none unless `keep`), and normalisers.

    The normalisers are those with sinks, (B, S, H); without sinks they are empty.
    """
    way, end, scoring = KERNELS[kernel], 0, Scoring(window, scale, soft_cap)
    out, kept = q.new_empty(*q.shape[:3], v.shape[3]), way.kept(q) if keep else q.new_empty(0)
    normalisers = empty_normalisers(q, sinks)
    q, k, v, whole_out, *sums = _joined(document_ids, q, k, v, out, *([] if sinks is None else [normalisers]))
    # The joined result and normalisers are views: writing to them fills `out` and `normalisers`
    for queries, keys, mask in _segments(q, document_ids, kernel, window):
        part_q, part_k, part_v = q[:, queries], k[:, keys], v[:, keys]
        begin, end = end, end + (way.kept_size(part_q, part_k, window) if keep else 0)
        part, of_part = way.forward(part_q, part_k, part_v, mask, kept[begin:end], scoring, sinks)
        whole_out[:, queries] = part
        for tensor in sums:
            tensor[:, queries] = of_part
    return out, kept, normalisers


@torch.library.custom_op("forge_transformer::segment_attention_backward", mutates_args=())
def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    document_ids: Tensor | None,
    kernel: str,
    kept: Tensor,
    sinks: Tensor | None = None,
    window: int = 0,
    scale: float = 0.0,
    soft_cap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    way, end, scoring, shapes = KERNELS[kernel], 0, Scoring(window, scale, soft_cap), [t.shape for t in (q, k, v)]
    grad, q, k, v, out = _joined(document_ids, grad, q, k, v, out)
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if window:  # blocks share keys, whose gradients add up in float32 or wider
        wide = torch.promote_types(k.dtype, torch.float32)
        grad_k, grad_v = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    for queries, keys, mask in _segments(q, document_ids, kernel, window):
        part_q, part_k, part_v = q[:, queries], k[:, keys], v[:, keys]
        begin, end = end, end + way.kept_size(part_q, part_k, window)
        # Segments come in the order of the forward pass, so the ranges of `kept` agree; an empty one has empty ranges
        saved = out[:, queries], mask, kept[begin:end]
        to_q, to_k, to_v = way.backward(grad[:, queries], part_q, part_k, part_v, *saved, scoring, sinks)
        grad_q[:, queries] = to_q
        if window:
            grad_k[:, keys] += to_k
            grad_v[:, keys] += to_v
        else:
            grad_k[:, keys], grad_v[:, keys] = to_k, to_v
    return grad_q.view(shapes[0]), grad_k.to(k.dtype).view(shapes[1]), grad_v.to(v.dtype).view(shapes[2])


@_attend.register_fake
def _(
    q: Tensor,
    _k: Tensor,
    v: Tensor,
    _document_ids: Tensor | None,
    kernel: str,
    keep: bool,
    sinks: Tensor | None = None,
    *_options: float,
) -> tuple[Tensor, Tensor, Tensor]:
    kept = KERNELS[kernel].kept(q) if keep else q.new_empty(0)
    return q.new_empty(*q.shape[:3], v.shape[3]), kept, empty_normalisers(q, sinks)


@_attend_backward.register_fake
def _(_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, document_ids, ctx.kernel, _, sinks, *ctx.options = inputs
    out, kept, normalisers = output
    ctx.save_for_backward(q, k, v, out, document_ids, kept, sinks, normalisers)
    ctx.mark_non_differentiable(kept, normalisers)
    ctx.set_materialize_grads(False)  # else zeros as large as the saved elements are allocated for their gradient


def _differentiate(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 10
    q, k, v, out, document_ids, kept, sinks, normalisers = ctx.saved_tensors
    grads = _attend_backward(grad, q, k, v, out, document_ids, ctx.kernel, kept, sinks, *ctx.options)
    to_sinks = None if sinks is None else sinks_gradient(grad, out, normalisers, sinks)
    return *grads, None, None, None, to_sinks, None, None, None


_attend.register_autograd(_differentiate, setup_context=_save)
count_operator(
    torch.ops.forge_transformer.segment_attention,
    torch.ops.forge_transformer.segment_attention_backward,
    windows_at=(7, 9),
)
