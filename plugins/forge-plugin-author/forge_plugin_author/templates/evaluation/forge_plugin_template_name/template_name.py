"""The evaluation template_name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge, gt

from forge_core import EvaluationComponent

if TYPE_CHECKING:
    from forge_core.contracts.contexts import EvaluationContext


@frozen(kw_only=True)
class TemplateName(EvaluationComponent):
    """The share of held-out sequences whose mean loss is below a bound.

    Logs `eval/template_name`, from 0 to 1; nothing if the data has no held-out part.
    """

    below: float = field(default=1.0, validator=gt(0))
    """The bound, in nats a token."""
    sequences: int = field(default=0, validator=ge(0))
    """Number of sequences, always the same first ones; 0: all."""

    def evaluate(self, context: EvaluationContext) -> Mapping[str, float]:
        import torch

        if context.held_out is None:
            return {}
        counted = torch.zeros(2, dtype=torch.float64, device=context.build.device)
        for batch in context.batches(context.held_out, self.sequences):
            sums, tokens = context.executor.evaluate([batch]).per_sequence
            real = tokens > 0  # rows that pad the last batch have none
            low = real & (sums < self.below * tokens)
            counted += torch.stack([low.sum(), real.sum()])
        below, total = context.all_reduce(counted).tolist()
        return {"eval/template_name": below / max(total, 1)}
