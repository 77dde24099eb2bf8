"""Prompts whose positions attend to each other in both directions, for fusion `joint` with `prefix`.

Shapes: B sequences, S positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge_core.contracts.data import IGNORED_LABEL
from forge_core.contracts.errors import JobError, Problem
from forge_core.contracts.model import Model
from forge_kit.nn.derived_class import derived
from forge_kit.nn.generation import PROMPT
from forge_plugin_transformer.modules.documents import document_starts
from forge_plugin_transformer.modules.spans import SPANS, spans_problem, with_spans

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch

    Base = Model
else:
    Base = object


def prefix_of(batch: Batch) -> Tensor | None:
    """Returns which positions (B, S) belong to the prefix of their document; None if the batch does not show it.

    A prefix is what stands before the first learned token. No position of it has the label of another as its input,
    whatever the labels are, so a model cannot see what it learns to say.
    """
    if "labels" not in batch:
        return batch.get(PROMPT)
    learned = (batch["labels"] != IGNORED_LABEL).long()
    before = learned.cumsum(1) - learned  # labels[t] is the token after t, so the last of the prefix has a label
    if "document_ids" in batch:
        index = torch.arange(learned.shape[1], device=learned.device)
        # Labels of earlier documents do not count: subtract those before the document's first position.
        first = (document_starts(batch["document_ids"]) * index).cummax(1).values
        before = before - before.gather(1, first)
    return before == 0


class PrefixModel(Base):
    """Mixin of a model with fusion `joint`: adds the prefix of each document to batches, as a span."""

    asks_for_prompt = True

    def prepare_sequences(self, batch: Batch) -> Batch:
        """Adds spans while rows are whole: where a prefix ends depends on labels that other ranks may have."""
        batch = super().prepare_sequences(batch)
        if SPANS in batch or (prefix := prefix_of(batch)) is None:
            return batch
        return with_spans(batch, prefix.long() - 1, prefix.shape[1])

    def sequence_mixers(self) -> Mapping[str, int]:
        """None: a stage that replaces them by causal attention over other ranks' positions would drop the spans."""
        return {}


def add_prefix_spans(model: Any) -> None:
    """Has positions of a prompt attend to each other in a model with fusion `joint`.

    Raises:
        JobError: an attention of the language model is causal everywhere.
    """
    if problem := spans_problem(model):
        hint = "take another language model or attention, such as gqa without mtp, or set prefix = false"
        raise JobError([Problem("model.fusion.prefix", f"{problem}; {hint}")])
    base: Any = type(model)
    model.__class__ = derived(PrefixModel, base)
