"""Direct preference optimisation (Rafailov et al. 2023): learns which of two answers is preferred, from pairs of them.

    [loss]
    type = "./dpo.py:DPO"
    reference = "runs/base/checkpoints/step-1000"

    [checkpoint.load]
    path = "runs/base/checkpoints/step-1000"

A sequence is a pair (`pairs.py`): document 0 in it is the chosen answer with its prompt, document 1 the rejected one.
Shapes: B pairs, S positions.
"""

from __future__ import annotations

from pathlib import Path

import torch
from attrs import field, frozen
from attrs.validators import gt
from torch.nn.functional import logsigmoid

from forge_core import ForgeError, JobError, LossComponent, Problem
from forge_core.contracts.data import IGNORED_LABEL
from forge_core.losses import loss_output
from forge_core.vocab_parallel import vocab_cross_entropy
from forge_plugin_losses.teacher import load_trained


@frozen(kw_only=True)
class DPO(LossComponent):
    """-log sigmoid(beta (r(chosen) - r(rejected))) of each pair, r = log p(answer) - log p_reference(answer).

    The mean over pairs is logged as `loss/dpo`, with the share of pairs in the right order and their mean margin. The
    loss that is reported is the cross-entropy of the chosen answers.
    """

    reference: str
    """What the frozen reference is taken from: a checkpoint, or a run folder or job file with one."""
    beta: float = field(default=0.1, validator=gt(0))
    """How dear it is to leave the reference."""

    def problems(self, job, layout):
        if not Path(self.reference).exists():
            fix = "give a checkpoint, a run folder or a job file"
            yield Problem("reference", f"{self.reference} does not exist; {fix}")
        if layout.cp > 1:
            yield Problem("", "compares whole answers, which parallel.cp splits; leave it out")

    def build(self, context):
        trained = load_trained(Path(self.reference), context)
        reference, theirs = trained.model, trained.manifest["provenance"].get("tokenizer")
        if context.tokenizer is not None and theirs not in (None, context.tokenizer.fingerprint()):
            fix = "take one that was trained with this job's"
            raise JobError([Problem("loss.reference", f"{trained.checkpoint} has another tokenizer; {fix}")])

        def loss(head, hidden, batch):
            if "document_ids" not in batch:
                raise ForgeError("loss: DPO compares two documents of a sequence, and the data has no document_ids")
            valid = batch["labels"] != IGNORED_LABEL
            chosen = batch["document_ids"] == 0
            log_p = log_probabilities(head, hidden, batch)
            anchor = log_p.sum() * 0
            if torch.is_grad_enabled():
                with torch.no_grad():
                    reference_log_p = log_probabilities(reference.head, reference(dict(batch)), batch)
                margins = self.beta * ((log_p - reference_log_p) * torch.where(chosen, 1, -1)).sum(-1)
                # Attached, as the mean is over the pairs of the global batch, and the sum that a loss returns is
                # divided by its tokens.
                anchor = context.auxiliary.attach(anchor, -logsigmoid(margins).sum(), unit="sequence", name="loss/dpo")
                context.auxiliary.metric("dpo/accuracy", (margins > 0).sum(), unit="sequence")
                context.auxiliary.metric("dpo/margin", margins.sum(), unit="sequence")
            return loss_output(anchor, -log_p.where(chosen, 0), valid & chosen)

        return loss


def log_probabilities(head, hidden, batch) -> torch.Tensor:
    """(B, S): log p of each label, 0 where it is ignored."""
    labels = batch["labels"]
    with head.whole(hidden.dtype):
        logits = head.logits(hidden)
    losses, _ = vocab_cross_entropy(logits, labels.clamp(min=0), head.vocab_shard)
    return -losses.where(labels != IGNORED_LABEL, 0)
