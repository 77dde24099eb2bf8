"""The largest score of each head, which kernels of attention do not return.

Shapes: B sequences, S positions, H query heads, K key/value heads, E width of a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forge_plugin_transformer.modules.documents import document_starts, places_in_documents
from forge_plugin_transformer.modules.spans import SPANS, span_numbers

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch
    from forge_plugin_transformer.scoring import Scoring

FEWEST_ROWS = 128
MOST_BLOCKS = 16
"""So that the graph of compiled code does not grow with the length."""


@torch.no_grad()
def largest_scores(q: Tensor, k: Tensor, batch: Batch, scoring: Scoring, *, bounded: bool = False) -> Tensor:
    """Returns the largest scaled product of a query and a key that it sees, for each head: (H,), in the dtype of q.

    Block by block of queries, S / 16 of them at a time, or 128: half of the products of causal attention.

    Args:
        q: (B, S, H, E), as attention's kernel gets them.
        k: (B, S, K, E).
        batch: `document_ids` and spans decide what a position sees, beside window and mask.
        scoring: factor, window and mask; a cap does not apply.
        bounded: whether positions of a span see each other within the window only.
    """
    length, groups = q.shape[1], q.shape[2] // k.shape[2]
    rows = max(FEWEST_ROWS, -(-length // MOST_BLOCKS))
    positions = torch.arange(length, device=q.device)
    documents = document_starts(batch["document_ids"]).cumsum(1) if "document_ids" in batch else None
    spans = span_numbers(batch) if SPANS in batch else None
    window, mask = scoring.window_in(length), scoring.mask
    places = places_in_documents(batch["document_ids"]) if "document_ids" in batch else positions[None]
    largest: Tensor | None = None
    for start in range(0, length, rows):
        own = slice(start, start + rows)
        ahead = spans is not None or not scoring.causal  # a span's positions see later ones
        stop = length if ahead else min(start + rows, length)
        seen = (positions[:stop] <= positions[own, None]) | (not scoring.causal)
        if mask is not None:
            itself = positions[:stop] == positions[own, None]
            seen = seen & (mask.sees(places[:, own, None], places[:, None, :stop]) | itself)
        if window:
            seen = seen & (positions[:stop] > positions[own, None] - window)
        if documents is not None:
            seen = seen & (documents[:, None, :stop] == documents[:, own, None])
        if spans is not None:
            within = spans[:, None, :stop] == spans[:, own, None]
            if window and bounded:
                within = within & (positions[:stop] > positions[own, None] - window)
            seen = seen | (within & (batch[SPANS][:, own, None] >= 0))
        scores = torch.einsum("brkge,btke->kgbrt", q[:, own].unflatten(2, (-1, groups)), k[:, :stop])
        peaks = scores.masked_fill(~seen, -torch.inf).amax((2, 3, 4)).flatten()
        largest = peaks if largest is None else torch.maximum(largest, peaks)
    assert largest is not None
    # Scaled last: the factor is above 0, so it changes no order
    return largest * scoring.factor(q.shape[-1])
