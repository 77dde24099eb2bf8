"""The log-probability of every choice, under every layout. Shapes: B rows, S positions, D model width, N labels."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import torch

from forge_core.contracts.data import IGNORED_LABEL
from forge_core.losses import loss_output
from forge_core.parallel.layout import micro_batches
from forge_core.vocab_parallel import accumulation_dtype, vocab_cross_entropy
from forge_plugin_evaluate.tasks.rows import ROW

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from forge_core.contracts.contexts import EvaluationContext
    from forge_core.contracts.data import Batch, Dataset
    from forge_core.contracts.model import Head
    from forge_core.contracts.runtime import LossOutput

AT_A_TIME = 1024
"""Labels whose logits are held at a time."""


def log_probabilities(context: EvaluationContext, rows: Dataset) -> np.ndarray:
    """Returns the natural logarithm of the probability of each row's labels. Collective.

    Args:
        context: of the evaluation.
        rows: rows with their number as the additional entry `ROW`; only choices are labelled in them.
    """
    # By the number of the row, so that ranks that compute other rows, or other positions of the same, may be summed.
    table = torch.zeros(len(rows), dtype=torch.float64, device=context.build.device)
    batches = iter(context.batches(rows, 0))
    # As many micro-batches at a time as a step has: of one alone, all ranks of a pipeline but one would wait.
    at_a_time, _ = micro_batches(context.job, context.build.layout)
    while group := list(islice(batches, at_a_time)):
        # Taken out of the batches below, since models have no such input
        numbers = torch.cat([batch[ROW] for batch in group])
        known = [{name: entry for name, entry in batch.items() if name != ROW} for batch in group]
        sums, _ = context.executor.evaluate(known, choice_loss).per_sequence
        table.index_add_(0, numbers, -sums.double())
    return context.all_reduce(table).cpu().numpy()


def choice_loss(head: Head, hidden: Tensor, batch: Batch) -> LossOutput:
    """Cross-entropy in nats of the labels, whatever the loss of the job is. See `LossFunction`."""
    labels = batch["labels"]
    valid = labels != IGNORED_LABEL
    losses = torch.zeros(labels.shape, dtype=accumulation_dtype(hidden.dtype), device=hidden.device)
    # Logits of labelled positions only: contexts are most of a row, and the vocabulary is large. Ranks that share the
    # head have the same labels, and so as many parts.
    places = valid.nonzero()
    with head.whole(hidden.dtype):
        for part in places.split(AT_A_TIME) if len(places) else ():
            where = part.unbind(1)
            losses[where], _ = vocab_cross_entropy(head.logits(hidden[where]), labels[where], head.vocab_shard)
    return loss_output(losses.sum(), losses, valid)
