"""How often the right next token is among the likeliest, on held-out sequences.

    [evaluations.accuracy]
    type = "./accuracy.py:Accuracy"
    top = 5

It is logged as `eval/accuracy`, whenever the job evaluates and under every layout.
"""

from __future__ import annotations

import torch
from attrs import field, frozen
from attrs.validators import ge

from forge_core import EvaluationComponent
from forge_core.contracts.data import IGNORED_LABEL
from forge_core.losses import loss_output
from forge_core.vocab_parallel import combine_gathered, local_labels


@frozen(kw_only=True)
class Accuracy(EvaluationComponent):
    """Share of held-out tokens than which fewer than `top` others are held likelier.

    The executor runs the model, so that it may be split in any way; this looks at what reaches the head.
    """

    top: int = field(default=1, validator=ge(1))
    """Among how many of the likeliest the right one must be."""
    sequences: int = field(default=0, validator=ge(0))
    """How many sequences, always the same first ones; 0: all."""

    def evaluate(self, context):
        if context.held_out is None:
            return {}
        total = torch.zeros(2, dtype=torch.float64, device=context.build.device)
        for batch in context.batches(context.held_out, self.sequences):
            output = context.executor.evaluate([batch], self.hits)
            total += torch.stack([output.loss_sum.double(), output.count.double()])
        hits, tokens = context.all_reduce(total).tolist()
        return {"eval/accuracy": hits / max(tokens, 1)}

    def hits(self, head, hidden, batch):
        """In the place of a loss: 1 where the label is among the likeliest, else 0."""
        valid = batch["labels"] != IGNORED_LABEL
        with head.whole(hidden.dtype):
            logits = head.logits(hidden)
        index, inside = local_labels(batch["labels"].clamp(min=0), head.vocab_shard)
        right = combine_gathered(logits.gather(-1, index[..., None])[..., 0], inside, head.vocab_shard)
        likelier = (logits > right[..., None]).sum(-1)
        if head.vocab_shard is not None:  # each rank has seen a slice of the vocabulary
            torch.distributed.all_reduce(likelier, group=head.vocab_shard.group)
        hits = ((likelier < self.top) & valid).to(right.dtype)
        return loss_output(hits.sum(), hits, valid)
