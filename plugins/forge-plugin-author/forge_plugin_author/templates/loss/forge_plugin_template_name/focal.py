"""The focal loss. Shapes: B sequences, S positions."""

from __future__ import annotations

from torch import Tensor

from forge_core.contracts.data import IGNORED_LABEL, Batch
from forge_core.contracts.model import Head
from forge_core.contracts.runtime import LossFunction, LossOutput
from forge_core.losses import loss_output
from forge_core.vocab_parallel import vocab_cross_entropy


def focal_loss(gamma: float) -> LossFunction:
    """Build a loss that returns sums, which the engine divides by the valid tokens of the global batch."""

    def loss(head: Head, hidden: Tensor, batch: Batch) -> LossOutput:
        labels = batch["labels"]
        valid = labels != IGNORED_LABEL
        with head.whole(hidden.dtype):
            logits = head.logits(hidden)
        # (B, S), from logits that may be this rank's slice of the vocabulary
        losses, _ = vocab_cross_entropy(logits, labels.where(valid, 0), head.vocab_shard)
        losses = losses.where(valid, 0)
        objective = (1 - (-losses).exp()) ** gamma * losses
        return loss_output(objective.sum(), losses, valid)

    return loss
