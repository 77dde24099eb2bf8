"""Spans: neighbouring positions, such as the positions of an image, that attend to each other in both directions.

Everything else stays causal. A batch marks the positions of spans (`with_spans`), and attention whose module has
`attends_spans = True` handles them. The kernel of causal attention computes all positions as without spans; those in
spans are computed once more, with a mask, and replace what it made of them. So positions outside of spans have the
same values to the bit, whatever the kernel and the way in which documents are kept apart.

Shapes: B sequences, S positions, M positions of a row in spans at most, T positions with the cached ones, H query
heads, K key/value heads, E width of a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from forge_plugin_transformer.modules.attention_core import torch_attention
from forge_plugin_transformer.modules.documents import document_starts
from forge_plugin_transformer.modules.softmax_attention import WHOLE
from forge_plugin_transformer.scoring import PLAIN, Scoring

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Model

SPANS = "attention_spans"
"""Batch entry (B, S) int64: neighbouring positions with equal numbers, 0 or more, are of one span; -1: of none."""
SPAN_POSITIONS = "attention_span_positions"
"""Batch entry (B, M) int64: the positions in spans, then any others, each once."""
SPAN_MASK = "attention_span_mask"
"""Batch entry (B, 1, M, S) bool, true where a position of `SPAN_POSITIONS` may attend; see `_mask_entry`."""


def with_spans(batch: Batch, spans: Tensor, at_most: int) -> Batch:
    """Returns the batch with entries that make positions of a span attend to each other.

    A span ends where the number changes, at a position of none, and at the end of a document. If it went on behind
    other positions, those before them would see what comes after, and a model its own labels.

    Args:
        batch: of whole sequences.
        spans: (B, S) int64, see `SPANS`.
        at_most: positions in spans that a row may have; more would not be computed. It sets shapes, and so the cost:
            attention of `at_most` queries to S keys, in addition to causal attention.
    """
    first = (spans < 0).byte().argsort(dim=1, stable=True)  # no look at how many there are, for which the host waits
    return {**batch, SPANS: spans, SPAN_POSITIONS: first[:, :at_most]}


def _mask_entry(window: int, bounded: bool) -> str:
    """Returns the name of the mask of layers with this window."""
    return f"{SPAN_MASK} {'bounded' if bounded else 'within'} {window}" if window else SPAN_MASK


def with_span_mask(batch: Batch, scoring: Scoring = PLAIN, *, bounded: bool = False) -> Batch:
    """Returns the batch with the mask of its spans, made once for all layers; unchanged if it has no spans.

    A position of a span sees the whole span, including positions outside of its window, as in Gemma 3. With `bounded`,
    it sees those that the window reaches back to, and all later ones, as in Gemma 4.
    """
    if SPANS not in batch:
        return batch
    window = scoring.window_in(batch[SPANS].shape[1])
    if (entry := _mask_entry(window, bounded)) in batch:
        return batch
    rows, numbers = batch[SPAN_POSITIONS], span_numbers(batch)
    index = torch.arange(numbers.shape[1], device=numbers.device)
    causal = index <= rows.unsqueeze(2)
    if window:
        causal &= index > rows.unsqueeze(2) - window
    if "document_ids" in batch:
        documents = document_starts(batch["document_ids"]).cumsum(1)
        causal &= documents.gather(1, rows).unsqueeze(2) == documents.unsqueeze(1)
    within = numbers.gather(1, rows).unsqueeze(2) == numbers.unsqueeze(1)  # rows of no span are computed, not used
    if window and bounded:
        within &= index > rows.unsqueeze(2) - window
    return {**batch, entry: (causal | within).unsqueeze(1)}


def attend_in_spans(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixed: Tensor,
    batch: Batch,
    scoring: Scoring = PLAIN,
    sinks: Tensor | None = None,
    *,
    bounded: bool = False,
) -> Tensor:
    """Replace the mixed values of positions in spans; returns `mixed` if the batch has none.

    Args:
        q: queries (B, S, H, E).
        k: keys (B, S, K, E).
        v: values (B, S, K, E).
        mixed: (B, S, H, E) of causal attention.
        batch: with or without spans.
        scoring: the scoring of causal attention.
        sinks: (H,), if there are any.
        bounded: see `with_span_mask`.
    """
    if SPANS not in batch:
        return mixed
    batch = with_span_mask(batch, scoring, bounded=bounded)
    mask = batch[_mask_entry(scoring.window_in(q.shape[1]), bounded)]
    rows = batch[SPAN_POSITIONS]
    is_within = batch[SPANS].gather(1, rows) >= 0
    index = rows[..., None, None].expand(-1, -1, *q.shape[2:])
    # Not with the kernel of causal attention, which may take no mask, or as many queries as keys only.
    both = torch_attention(q.gather(1, index), k, v, mask, scoring=scoring, sinks=sinks)
    # Positions of no span are written as well, with their own values, so that shapes do not depend on the data
    return mixed.scatter(1, index, both.where(is_within[..., None, None], mixed.gather(1, index)))


def see_spans(mask: Tensor, batch: Batch, reach: int = 0) -> Tensor:
    """Returns the mask (B, 1, S, T) of a cache with the spans of the S new positions, which are the last of T.

    Args:
        mask: without spans.
        batch: with spans or without.
        reach: positions of a span that one sees at most, itself and those before it; 0: all.
    """
    if SPANS not in batch or mask is WHOLE:
        return mask
    spans = batch[SPANS]
    numbers = span_numbers({SPANS: spans})  # a row with a cache is one document
    within = (numbers.unsqueeze(2) == numbers.unsqueeze(1)) & (spans >= 0).unsqueeze(1)
    if reach:
        index = torch.arange(spans.shape[1], device=spans.device)
        within &= index > index.unsqueeze(1) - reach
    return mask | F.pad(within, (mask.shape[-1] - spans.shape[1], 0)).unsqueeze(1)


def span_numbers(batch: Batch) -> Tensor:
    """Returns a number for each position (B, S) that neighbours share if they have one span and one document."""
    starts = document_starts(batch[SPANS])
    if "document_ids" in batch:
        starts = starts | document_starts(batch["document_ids"])
    return starts.cumsum(1)


def bound_spans(model: Model) -> str | None:
    """Have positions of a span see each other within windows only, and not at all in layers without one (Gemma 4).

    Returns:
        Why a bare model cannot; None if it does from now on.
    """
    for name, layer in model.layers.items():
        attention: Any = getattr(layer, "attention", layer)
        if not hasattr(attention, "spans_in_windows"):
            return f"{type(attention).__name__}, the attention of layers.{name}, has no windows"
        attention.spans_in_windows = True
    return None


def spans_problem(model: Model) -> str | None:
    """Returns which part of a bare model does not attend within spans; None if all layers do.

    A layer, or its `attention`, declares this with `attends_spans`.
    """
    for name, layer in model.layers.items():
        attention: Any = getattr(layer, "attention", layer)
        if not getattr(attention, "attends_spans", False):
            return f"{type(attention).__name__}, the attention of layers.{name}, is causal everywhere"
    if getattr(model, "mtp", None) is not None:
        # A module at position i has the token after i among its inputs, which is the label of the position before:
        # within a span that would see it.
        return "modules of multi-token prediction would see their own labels"
    return None
