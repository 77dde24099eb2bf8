"""The core's own loss, `cross_entropy`, and the form in which every loss reports. Imports torch late."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import and_, ge, lt

from forge_core.contracts.components import LossComponent
from forge_core.contracts.data import IGNORED_LABEL, Batch
from forge_core.contracts.runtime import LossFunction, LossOutput

if TYPE_CHECKING:
    from torch import Tensor

    from forge_core.auxiliary import Auxiliary
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.model import Head


@frozen(kw_only=True)
class CrossEntropy(LossComponent):
    """Next-token cross-entropy in nats, computed in float32, on any head and any split of the vocabulary.

    Plain and exact. It holds the logits of a whole micro-batch and their gradient; a loss that never holds all logits
    computes the same objective in a fraction of the memory.
    """

    label_smoothing: float = field(default=0.0, validator=and_(ge(0), lt(1)))
    """Share of the target that is spread evenly over the vocabulary (Szegedy et al. 2016). The cross-entropy with that
    even part is logged unweighted as `loss/uniform`; the reported loss does not contain it."""
    z_loss: float = field(default=0.0, validator=ge(0))
    """Weight of log(Z)² in the objective, Z the softmax's normaliser, which keeps logits from drifting (PaLM, Chowdhery
    et al. 2022, section 5, uses 1e-4). Logged unweighted as `loss/z_loss`; the reported loss does not contain it."""

    def build(self, context: BuildContext) -> LossFunction:
        return cross_entropy_loss(context.auxiliary, label_smoothing=self.label_smoothing, z_loss=self.z_loss)


def cross_entropy_loss(
    auxiliary: Auxiliary | None, *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> LossFunction:
    """The loss of `CrossEntropy`, a function of (head, hidden (B, S, D), batch). `auxiliary` logs its terms."""
    from forge_core.vocab_parallel import vocab_cross_entropy, vocab_mean

    def log(name: str, value: Tensor) -> None:
        if auxiliary is not None:
            auxiliary.metric(name, value, unit="token")

    def loss(head: Head, hidden: Tensor, batch: Batch) -> LossOutput:
        labels = batch["labels"]
        valid = labels != IGNORED_LABEL
        with head.whole(hidden.dtype):
            logits = head.logits(hidden)
        # Any label will do where there is none: -100 would index outside of the vocabulary, and the result is masked.
        losses, logsumexp = vocab_cross_entropy(logits, labels.where(valid, 0), head.vocab_shard)
        losses = losses.where(valid, 0)  # not a product: 0 times an infinite loss is NaN
        objective = losses.sum()
        if label_smoothing:  # -Σ log p / V over the vocabulary, without a second tensor of the logits' size
            uniform = (logsumexp - vocab_mean(logits, head.vocab_shard)).where(valid, 0).sum()
            log("loss/uniform", uniform)
            objective = objective.lerp(uniform, label_smoothing)
        if z_loss:
            squares = logsumexp.square().where(valid, 0).sum()
            log("loss/z_loss", squares)
            objective = objective + z_loss * squares
        return loss_output(objective, losses, valid)

    return loss


def loss_output(objective: Tensor, losses: Tensor, valid: Tensor) -> LossOutput:
    """The output of a loss: sums, which the step divides by the valid positions of all ranks.

    `objective` (), a sum over valid positions, is differentiated; `losses` (B, S), the cross-entropies and 0 where not
    `valid` (B, S), bool, are reported.
    """
    counts = valid.sum(-1, dtype=losses.dtype)
    return LossOutput(objective, counts.sum(), (losses.detach().sum(-1), counts))
