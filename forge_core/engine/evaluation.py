"""The core's own evaluation: the loss on held-out sequences."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge

from forge_core.contracts.components import EvaluationComponent

if TYPE_CHECKING:
    from forge_core.contracts.contexts import EvaluationContext


@frozen(kw_only=True)
class HeldOut(EvaluationComponent):
    """Token-weighted loss and perplexity over held-out sequences; bits per byte where the data knows its bytes.

    Logs `{prefix}/loss` in nats a token, `{prefix}/perplexity`, `{prefix}/tokens` and `{prefix}/bits_per_byte`. Does
    nothing where the data has no held-out part.
    """

    sequences: int = field(default=0, validator=ge(0))
    """How many sequences, always the same first ones; 0: all."""
    prefix: str = "eval"
    """What the names of the metrics start with."""

    def evaluate(self, context: EvaluationContext) -> Mapping[str, float]:
        import torch

        if context.held_out is None:
            return {}
        total = torch.zeros(2, dtype=torch.float64, device=context.build.device)
        for batch in context.batches(context.held_out, self.sequences):
            output = context.executor.evaluate([batch])
            total += torch.stack([output.loss_sum.double(), output.count.double()])
        loss_sum, tokens = context.all_reduce(total).tolist()
        loss = loss_sum / max(tokens, 1)
        metrics = {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "tokens": tokens}
        if context.held_out.bytes_per_token:
            metrics["bits_per_byte"] = loss / math.log(2) / context.held_out.bytes_per_token
        return {f"{self.prefix}/{name}": value for name, value in metrics.items()}
