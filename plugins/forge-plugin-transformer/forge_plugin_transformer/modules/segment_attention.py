"""Attention within documents on the CPU, segment by segment, so that no pair across documents is computed.

A segment is a whole document, or several short neighbours, which share one call with a small mask, since each call
costs about as much as the attention of a hundred positions.

Forward and backward are custom operators: document boundaries differ from batch to batch, so `torch.compile` must not
trace the loop over segments.

Shapes: B sequences, S positions, H query heads, K key/value heads, E width of a head, V that of its values,
W positions of a segment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from forge_plugin_transformer.modules import gemm_attention
from forge_plugin_transformer.modules.documents import document_starts, mask_of
from forge_plugin_transformer.modules.narrow_values import narrowed, padded

TOGETHER = 128
"""Neighbouring documents of at most this total length make one segment: of 64, 128 and 256 about the fastest for
documents of 8 to 64."""


def segment_attention(
    q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor, kernel: Literal["flash", "gemm"]
) -> Tensor:
    """Causal attention within each document: q (B, S, H, E), k (B, S, K, E), v (B, S, K, V) -> (B, S, H, V).

    Args:
        q: queries.
        k: keys.
        v: values.
        document_ids: (B, S), equal where neighbours are of one document.
        kernel: kernel of the segments.
    """
    width, v = v.shape[-1], padded(v, k, kernel)
    return narrowed(_attend(q, k, v, document_ids, kernel, torch.is_grad_enabled())[0], width)


class Segment(NamedTuple):
    """A range of positions in the concatenation of all rows."""

    positions: slice
    mask: Tensor | None
    """(1, 1, W, W) bool, true where a position may attend; None: one document, so each attends to all before it."""

    def of(self, x: Tensor) -> Tensor:
        """Returns its part of x (B, S, heads, E), contiguous: (1, W, heads, E), a view."""
        return x.flatten(0, 1)[None, self.positions]


def segments(document_ids: Tensor) -> Iterator[Segment]:
    """Yields the segments that cover all rows, in order."""
    starts = document_starts(document_ids).flatten()
    numbers = starts.cumsum(0)
    for start, stop, documents in _grouped([*starts.nonzero().flatten().tolist(), len(starts)]):
        mask = mask_of(numbers[start:stop])[None, None] if documents > 1 else None
        yield Segment(slice(start, stop), mask)


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
    """Attention of one segment: q (1, W, H, E), k (1, W, K, E), v (1, W, K, V) -> (1, W, H, V)."""

    def kept_size(self, q: Tensor, k: Tensor) -> int:
        """Returns the number of elements to save for the backward pass."""

    def kept(self, q: Tensor) -> Tensor:
        """Allocates the saved elements of all segments of q (B, S, H, E)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kept: Tensor) -> Tensor:
        """Computes a segment, and writes its saved elements into `kept`, unless that is empty."""

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, mask: Tensor | None, kept: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns gradients of q, k and v."""


class Flash:
    """torch's flash kernel; saves the logarithm of each softmax's normaliser."""

    def kept_size(self, q: Tensor, k: Tensor) -> int:
        return q.shape[1] * q.shape[2]

    def kept(self, q: Tensor) -> Tensor:
        return q.new_empty(q.shape[:3].numel(), dtype=torch.promote_types(q.dtype, torch.float32))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kept: Tensor) -> Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        out, normalisers = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, is_causal=mask is None, attn_mask=_additive(mask, q)
        )
        if len(kept):
            kept.view(q.shape[:3]).copy_(normalisers)
        return out.transpose(1, 2)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, mask: Tensor | None, kept: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad, q, k, v, out = (tensor.transpose(1, 2) for tensor in (grad, q, k, v, out))
        normalisers, causal, additive = kept.view(q.shape[:3]), mask is None, _additive(mask, q)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, normalisers, 0.0, causal, attn_mask=additive
        )
        grad_q, grad_k, grad_v = (tensor.transpose(1, 2) for tensor in grads)
        return grad_q, grad_k, grad_v


def _additive(mask: Tensor | None, like: Tensor) -> Tensor | None:
    if mask is None:
        return None
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask.logical_not(), -torch.inf)


class Gemm:
    """Blocks of plain matrix products; saves the probabilities of segments that are not too long."""

    def kept_size(self, q: Tensor, k: Tensor) -> int:
        return gemm_attention.kept_size(q, k) if q.shape[1] <= gemm_attention.KEEP_UP_TO else 0

    def kept(self, q: Tensor) -> Tensor:
        """Allocates enough for any division into segments; only pages that are written take memory."""
        longest = min(max(q.shape[1], TOGETHER), gemm_attention.KEEP_UP_TO)  # short rows are joined too
        return q.new_empty(q.shape[:3].numel() * longest)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kept: Tensor) -> Tensor:
        return gemm_attention.attend(q, k, v, mask, kept)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, mask: Tensor | None, kept: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return gemm_attention.attend_backward(grad, q, k, v, mask, kept)


KERNELS: Mapping[str, SegmentKernel] = {"flash": Flash(), "gemm": Gemm()}


@torch.library.custom_op("forge_transformer::segment_attention", mutates_args=())
def _attend(q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor, kernel: str, keep: bool) -> tuple[Tensor, Tensor]:
    """Returns the result, and the saved elements of all segments concatenated; none unless `keep`."""
    way, end = KERNELS[kernel], 0
    out, kept = q.new_empty(*q.shape[:3], v.shape[3]), way.kept(q) if keep else q.new_empty(0)
    q, k, v = (tensor.contiguous() for tensor in (q, k, v))
    for segment in segments(document_ids):
        part_q, part_k, part_v = (segment.of(tensor) for tensor in (q, k, v))
        begin, end = end, end + (way.kept_size(part_q, part_k) if keep else 0)
        segment.of(out).copy_(way.forward(part_q, part_k, part_v, segment.mask, kept[begin:end]))
    return out, kept


@torch.library.custom_op("forge_transformer::segment_attention_backward", mutates_args=())
def _attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, document_ids: Tensor, kernel: str, kept: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    way, end = KERNELS[kernel], 0
    grad, q, k, v = (tensor.contiguous() for tensor in (grad, q, k, v))
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for segment in segments(document_ids):
        part_q, part_k, part_v, part_out, part_grad = (segment.of(tensor) for tensor in (q, k, v, out, grad))
        begin, end = end, end + way.kept_size(part_q, part_k)
        parts = way.backward(part_grad, part_q, part_k, part_v, part_out, segment.mask, kept[begin:end])
        for whole, part in zip(grads, parts, strict=True):
            segment.of(whole).copy_(part)
    return grads


@_attend.register_fake
def _(q: Tensor, _k: Tensor, v: Tensor, _document_ids: Tensor, kernel: str, keep: bool) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[3]), KERNELS[kernel].kept(q) if keep else q.new_empty(0)


@_attend_backward.register_fake
def _(
    _grad: Tensor, q: Tensor, k: Tensor, v: Tensor, _out: Tensor, _document_ids: Tensor, _kernel: str, _kept: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor, str, bool], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, document_ids, ctx.kernel, _ = inputs
    out, kept = output
    ctx.save_for_backward(q, k, v, out, document_ids, kept)
    ctx.mark_non_differentiable(kept)
    ctx.set_materialize_grads(False)  # else zeros as large as the saved elements are allocated for their gradient


def _differentiate(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 6
    q, k, v, out, document_ids, kept = ctx.saved_tensors
    return *_attend_backward(grad, q, k, v, out, document_ids, ctx.kernel, kept), None, None, None


_attend.register_autograd(_differentiate, setup_context=_save)
