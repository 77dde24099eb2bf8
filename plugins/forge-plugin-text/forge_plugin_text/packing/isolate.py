"""Packing `isolate`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

from attrs import frozen

from forge_core.data.packing import WindowPacking

if TYPE_CHECKING:
    import numpy as np

    from forge_core.contracts.errors import Problem
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.model import Model
    from forge_core.data.windows import Window


@frozen(kw_only=True)
class Isolate(WindowPacking):
    """Concatenates documents and cuts every `train.seq_len` tokens; each is learned as if it stood alone.

    Attention stays within a document, positions count from 0 at its start, and its first token is no label, since
    nothing precedes it. The rest of a document after a cut is a separate document in the next sequence.
    """

    isolates: ClassVar[bool] = True
    accepts_sequences: ClassVar[bool] = True

    def model_problems(self, model: Model, layout: Layout) -> Iterable[Problem]:
        """Runs the model on a short sequence to find a part in which documents see each other."""
        from forge_plugin_text.packing.apart import leak_problems

        return leak_problems(model)

    def sequence(self, window: Window) -> Mapping[str, np.ndarray]:
        """Returns the window with `document_ids` and `positions`; first tokens of documents are no labels."""
        from forge_plugin_text.packing.apart import apart

        return apart(window)
