"""Next-token cross-entropy from whole logits, and the form in which every loss reports. Shapes as in `protocols`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forge_core.contracts.data import IGNORED_LABEL
from forge_core.contracts.runtime import LossOutput
from forge_core.vocab_parallel import vocab_cross_entropy, vocab_mean

if TYPE_CHECKING:
    from forge_core.auxiliary import Auxiliary
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Head
    from forge_core.contracts.runtime import LossFunction


def cross_entropy_loss(
    auxiliary: Auxiliary | None, *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> LossFunction:
    """The loss `cross_entropy`. `auxiliary`: where smoothing (the cross-entropy with an even distribution) and z-loss
    (Σ logsumexp²) are logged, unweighted, if anywhere."""

    def log(name: str, value: Tensor) -> None:
        if auxiliary is not None:
            auxiliary.metric(name, value, unit="token")

    def loss(head: Head, hidden: Tensor, batch: Batch) -> LossOutput:
        labels = batch["labels"]
        valid = labels != IGNORED_LABEL
        with head.whole(hidden.dtype):
            logits = head.logits(hidden)
        losses, logsumexp = vocab_cross_entropy(logits, labels.where(valid, 0), head.vocab_shard)
        losses = losses.where(valid, 0)
        objective = losses.sum()
        if label_smoothing:
            uniform = (logsumexp - vocab_mean(logits, head.vocab_shard)).where(valid, 0).sum()
            log("loss/uniform", uniform)
            objective = torch.lerp(objective, uniform, label_smoothing)
        if z_loss:
            squares = logsumexp.square().where(valid, 0).sum()
            log("loss/z_loss", squares)
            objective = objective + z_loss * squares
        return loss_output(objective, losses, valid)

    return loss


def loss_output(objective: Tensor, losses: Tensor, valid: Tensor) -> LossOutput:
    """What a loss returns.

    Args:
        objective: (), what is differentiated, summed over valid positions.
        losses: (B, S), what is reported: the cross-entropy of each position, 0 where it is not valid.
        valid: (B, S), bool.
    """
    counts = valid.sum(-1, dtype=losses.dtype)
    return LossOutput(objective, counts.sum(), (losses.detach().sum(-1), counts))
