"""Packing `best_fit`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from attrs import frozen

from forge_core.contracts.components import PackingComponent

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Dataset, Documents
    from forge_core.contracts.errors import Problem
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.model import Model


@frozen(kw_only=True)
class BestFit(PackingComponent):
    """Packs whole documents into sequences, each learned as if it stood alone.

    Best-fit decreasing (Ding et al. 2024, "Fewer Truncations Improve Language Modeling"): from the longest to the
    shortest, each document goes into the sequence with the least room that suffices. Documents longer than
    `train.seq_len` are cut into whole sequences and a rest. Remaining room is padded with ignored labels; the run's
    summary shows the filled share. The packing is cached.

    A document of n tokens takes n - 1 positions, one for each token that can be predicted from those before it, so no
    label is lost, not even where a long document is cut. Attention stays within a document, or a piece of a long one,
    and positions count from 0 there.
    """

    isolates: ClassVar[bool] = True
    accepts_sequences: ClassVar[bool] = True

    def model_problems(self, model: Model, layout: Layout) -> Iterable[Problem]:
        """Runs the model on a short sequence to find a part in which documents see each other."""
        from forge_plugin_text.packing.apart import leak_problems

        return leak_problems(model)

    def build(self, context: BuildContext, documents: Documents) -> Dataset:
        """Packs the documents, or maps the packing in the cache."""
        from forge_plugin_text.packing.sequences import PackedSequences

        return PackedSequences(documents, context.job.train.seq_len)
