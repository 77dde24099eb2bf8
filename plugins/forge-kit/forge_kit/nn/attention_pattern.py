"""What queries attend to, computed beside the kernel that runs: the one formula of all that shows or keeps it.

Shapes: B sequences, S positions, n queries of each sequence, H query heads, K key/value heads, G = H / K, E width of a
head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

SPANS, DOCUMENTS = "attention_spans", "document_ids"
"""Batch entries (B, S). Neighbours with equal documents are of one, which attention does not leave; neighbours with
equal spans, 0 or more, attend to each other in both directions."""


def attention_pattern(
    q: Tensor,
    k: Tensor,
    places: Tensor,
    batch: Mapping[str, Tensor],
    mixing: Mapping[str, Any],
    sinks: Tensor | None = None,
) -> Tensor:
    """Returns the weights of queries for all keys: (B, n, H, S), in at least float32.

    Args:
        q: (B, n, H, E), as the kernel receives them.
        k: (B, S, K, E), all keys in the order of the sequence.
        places: (B, n), the position of each query.
        batch: may hold `SPANS` and `DOCUMENTS`, of all positions.
        mixing: what differs from plain causal attention: see `forge_kit.nn.taps.MIXING`.
        sinks: (H,), scores without a value: weights then sum to less than 1.
    """
    scores = _scores(q, k, mixing)
    scores = scores.masked_fill(~_visible(places, k.shape[1], batch, mixing).unsqueeze(2), -torch.inf)
    if sinks is None:
        return scores.softmax(-1)
    # A sink takes part in the softmax as a further key, which has no value and is left out of the result
    column = sinks.detach().to(scores.dtype).view(1, 1, -1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


def _scores(q: Tensor, k: Tensor, mixing: Mapping[str, Any]) -> Tensor:
    """Scores before the mask: (B, n, H, S)."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    # The G query heads of a key/value head are neighbours
    grouped = q.to(dtype).unflatten(2, (k.shape[2], -1))
    scores = torch.einsum("bnkge,bske->bnkgs", grouped, k.to(dtype)).flatten(2, 3)
    scores = scores * (mixing.get("scale") or q.shape[-1] ** -0.5)
    cap = mixing.get("soft_cap")
    return (scores / cap).tanh() * cap if cap else scores


def _visible(places: Tensor, length: int, batch: Mapping[str, Tensor], mixing: Mapping[str, Any]) -> Tensor:
    """Which of S keys each query sees: (B, n, S)."""
    keys = torch.arange(length, device=places.device)
    queries = places.unsqueeze(2)
    both_ways = mixing.get("bidirectional_mask")
    seen = (keys >= 0) & (queries >= 0) if both_ways else keys <= queries
    if mask := both_ways or mixing.get("mask"):
        # Positions of a mask count from the start of their document, and itself is seen always
        starts = _starts(_numbered(batch[DOCUMENTS])) if DOCUMENTS in batch else torch.zeros_like(keys)[None]
        within = (keys - starts).expand(len(places), -1)
        seen = seen & (mask.sees(within.gather(1, places).unsqueeze(2), within.unsqueeze(1)) | (keys == queries))
    if window := mixing.get("window"):
        seen = seen & (keys > queries - window)
    documents = [batch[DOCUMENTS]] if DOCUMENTS in batch else []
    if documents:
        seen = seen & _equal(_numbered(*documents), places)
    if SPANS in batch:
        # Spans go beyond causality and window, but not beyond a document
        inside = (batch[SPANS] >= 0).unsqueeze(1)
        seen = seen | (_equal(_numbered(batch[SPANS], *documents), places) & inside)
    return seen


def _starts(numbers: Tensor) -> Tensor:
    """The first position with the number of each (B, S), numbers ascending by 1: (B, S)."""
    return torch.searchsorted(numbers.contiguous(), numbers.contiguous())


def _equal(numbers: Tensor, places: Tensor) -> Tensor:
    """Whether each query's position equals each key's, for positions (B, S): (B, n, S)."""
    return numbers.gather(1, places).unsqueeze(2) == numbers.unsqueeze(1)


def _numbered(*entries: Tensor) -> Tensor:
    """A number of each position (B, S), equal for neighbours that have equal entries."""
    # By neighbours and not by values, since a value may come again later in the row
    starts = torch.zeros_like(entries[0], dtype=torch.bool)
    for entry in entries:
        starts[:, 1:] |= entry[:, 1:] != entry[:, :-1]
    return starts.cumsum(1)
