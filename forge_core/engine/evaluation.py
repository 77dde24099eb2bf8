"""The core's own evaluation: the loss on held-out sequences."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge

from forge_core.contracts.components import EvaluationComponent
from forge_core.contracts.data import BYTES_PER_TOKEN, IGNORED_LABEL

if TYPE_CHECKING:
    from forge_core.contracts.contexts import EvaluationContext


@frozen(kw_only=True)
class HeldOut(EvaluationComponent):
    """Token-weighted loss and perplexity over held-out sequences; bits per byte where the data knows its bytes.

    Logs `{prefix}/loss` in nats a token, `{prefix}/perplexity`, `{prefix}/tokens` and `{prefix}/bits_per_byte`. Does
    nothing where the data has no held-out part.
    """

    sequences: int = field(default=0, validator=ge(0))
    """How many sequences, always the same, evenly spread over all held-out ones; 0: all."""
    prefix: str = "eval"
    """Prefix of the names of the metrics."""

    def evaluate(self, context: EvaluationContext) -> Mapping[str, float]:
        import torch

        if context.held_out is None:
            return {}
        total = torch.zeros(4, dtype=torch.float64, device=context.build.device)
        for batch in context.batches(context.held_out, self.sequences):
            output = context.executor.evaluate([batch])
            total[:2] += torch.stack([output.loss_sum.double(), output.count.double()])
            if BYTES_PER_TOKEN in batch:
                labels = (batch["labels"] != IGNORED_LABEL).sum(dim=1)
                total[2:] += torch.stack([(labels * batch[BYTES_PER_TOKEN]).sum(), labels.sum().double()])
        # The labels are counted apart from `tokens`: ranks that divide sequences each count those of whole ones.
        loss_sum, tokens, text_bytes, all_labels = context.all_reduce(total).tolist()
        loss = loss_sum / max(tokens, 1)
        metrics = {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "tokens": tokens}
        if text_bytes:
            metrics["bits_per_byte"] = loss / math.log(2) / (text_bytes / all_labels)
        return {f"{self.prefix}/{name}": value for name, value in metrics.items()}
