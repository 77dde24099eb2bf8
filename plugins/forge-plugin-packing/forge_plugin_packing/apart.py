"""The samples of isolated documents. S: positions of a sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from forge_core.contracts.data import IGNORED_LABEL

if TYPE_CHECKING:
    from forge_core.data.windows import Window


def apart(window: Window) -> Mapping[str, np.ndarray]:
    """Returns a window's S inputs and labels, with the number of each position's document and its position within."""
    assert window.starts is not None
    labels = np.where(window.starts[1:], IGNORED_LABEL, window.labels())
    return {"input_ids": window.tokens[:-1], "labels": labels, **places(window.starts[:-1])}


def places(starts: np.ndarray) -> dict[str, np.ndarray]:
    """Returns `document_ids` and `positions`, each (S,) int64, both from 0.

    Args:
        starts: (S,) bool, where a document begins; the first position counts as one in any case.
    """
    starts = starts.copy()
    starts[0] = True
    index = np.arange(len(starts))
    return {
        "document_ids": np.cumsum(starts) - 1,
        "positions": index - np.maximum.accumulate(np.where(starts, index, 0)),
    }
