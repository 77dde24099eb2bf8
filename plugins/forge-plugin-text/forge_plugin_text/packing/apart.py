"""The samples of isolated documents. S: positions of a sequence."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from forge_core.contracts.data import IGNORED_LABEL
from forge_core.contracts.errors import Problem

if TYPE_CHECKING:
    from forge_core.contracts.model import Model
    from forge_core.data.windows import Window


def apart(window: Window) -> Mapping[str, np.ndarray]:
    """Returns a window's S inputs and labels, with the number of each position's document and its position within."""
    assert window.starts is not None
    # The last token of a document does not predict the first of the next one.
    labels = np.where(window.starts[1:], IGNORED_LABEL, window.labels())
    return {"input_ids": window.tokens[:-1], "labels": labels, **places(window.starts[:-1])}


def places(starts: np.ndarray) -> dict[str, np.ndarray]:
    """Returns `document_ids` and `positions`, each (S,) int64, both from 0.

    Args:
        starts: (S,) bool, where a document begins; the first position counts as one in any case.
    """
    # A copy: callers pass a slice of a window, which would change with it
    starts = starts.copy()
    starts[0] = True
    index = np.arange(len(starts))
    return {
        "document_ids": np.cumsum(starts) - 1,
        # The index, less the one of the latest start
        "positions": index - np.maximum.accumulate(np.where(starts, index, 0)),
    }


def leak_problems(model: Model) -> Iterator[Problem]:
    """Yields a problem if documents of one sequence see each other in some part of the model."""
    from forge_kit.nn.position_probe import ProbeFailed, leaking_part

    cls = type(model).__name__
    try:
        name = leaking_part(model)
    except ProbeFailed as error:
        message = f"data.packing: not checked whether {cls} keeps documents apart: it does not run"
        warnings.warn(f"{message} on the CPU, with a short sequence ({error})", stacklevel=2)
        return
    if name is not None:
        message = f"documents of a sequence change each other in {name} of {cls}"
        yield Problem("", f"{message}; let it stay within equal `document_ids` of the batch, or take another packing")
