"""Documents that share a sequence: their starts, and masks between their positions.

Neighbouring positions with equal `document_ids` are of one document. An id that occurs again later in a row is another
document.

Shapes: B sequences, S positions.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

FEWEST_BOUNDS = 16
"""Shortest length of a list of bounds."""


def document_starts(document_ids: Tensor) -> Tensor:
    """Marks the first position of each document, each row's first position included: (B, S) -> (B, S) bool."""
    return F.pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0), value=True)


def document_mask(document_ids: Tensor) -> Tensor:
    """Mask within documents: a position attends to its own document up to itself. (B, S) -> (B, 1, S, S) bool."""
    return mask_of(document_starts(document_ids).cumsum(1))[:, None]


def mask_of(numbers: Tensor) -> Tensor:
    """Like `document_mask`, from the number of each position's document: (…, S) -> (…, S, S) bool."""
    return (numbers[..., :, None] == numbers[..., None, :]).tril_()


def document_bounds(document_ids: Tensor) -> Tensor:
    """Returns the starts of documents in the concatenation of all rows, then B S: ascending int32, one dimension.

    B S is repeated up to a power of two, as bounds of empty documents, so that compiled code meets few shapes. The host
    waits for the device once, for the number of documents.
    """
    begins = document_starts(document_ids).flatten().nonzero().flatten()
    length = max(FEWEST_BOUNDS, 1 << len(begins).bit_length())
    return F.pad(begins, (0, length - len(begins)), value=document_ids.numel()).int()
