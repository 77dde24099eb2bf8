"""Documents that share a sequence: their starts, and masks between their positions.

Neighbouring positions with equal `document_ids` are of one document. An id that occurs again later in a row is another
document.

Shapes: B sequences, S positions.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

FEWEST_BOUNDS = 16
"""Shortest length of a list of bounds."""


def document_starts(document_ids: Tensor) -> Tensor:
    """Marks the first position of each document, each row's first position included: (B, S) -> (B, S) bool."""
    return F.pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0), value=True)


def places_in_documents(document_ids: Tensor) -> Tensor:
    """Returns how many positions of its document come before each: (B, S) -> (B, S)."""
    places = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    # The latest start so far is subtracted
    return places - places.where(document_starts(document_ids), 0).cummax(1).values


def document_mask(document_ids: Tensor, window: int = 0) -> Tensor:
    """Mask within documents: a position attends to its own document up to itself. (B, S) -> (B, 1, S, S) bool.

    With a window, it attends to itself and the `window` - 1 positions before it at most.
    """
    return mask_of(document_starts(document_ids).cumsum(1), window)[:, None]


def mask_of(numbers: Tensor, window: int = 0) -> Tensor:
    """Like `document_mask`, from the number of each position's document: (…, S) -> (…, S, S) bool."""
    mask = (numbers[..., :, None] == numbers[..., None, :]).tril_()
    return mask.triu_(1 - window) if window else mask


def window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """Mask within one document: (1, 1, S, S) bool."""
    return torch.ones(1, 1, length, length, dtype=torch.bool, device=device).tril_().triu_(1 - window)


def document_bounds(document_ids: Tensor) -> Tensor:
    """Returns the starts of documents in the concatenation of all rows, then B S: ascending int32, one dimension.

    B S is repeated up to a power of two, as bounds of empty documents, so that compiled code meets few shapes. The host
    waits for the device once, for the number of documents.
    """
    begins = document_starts(document_ids).flatten().nonzero().flatten()
    # Greater than the number of documents, so that B S, the last bound, occurs at least once
    length = max(FEWEST_BOUNDS, 1 << len(begins).bit_length())
    return F.pad(begins, (0, length - len(begins)), value=document_ids.numel()).int()
