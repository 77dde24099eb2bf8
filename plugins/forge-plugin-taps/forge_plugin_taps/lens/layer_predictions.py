"""The logit lens: what the model would predict after each of its layers (nostalgebraist 2020).

Shapes: L layers, S positions, V vocabulary, N tokens shown.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from forge_core.contracts.model import Model


@frozen
class LogitLens:
    """Predictions of the next token, before the first layer and after each: L + 1 rows."""

    names: Sequence[str]
    """Of the rows: `embed`, then `layers.N.resid_post`."""
    top: Tensor
    """(L + 1, S, N) int64: the likeliest tokens, descending."""
    probabilities: Tensor
    """(L + 1, S, N), float32 or wider: of these tokens."""
    entropy: Tensor
    """(L + 1, S), nats: of the prediction."""
    divergence: Tensor
    """(L + 1, S), nats: KL(the model's prediction, this one)."""


@torch.no_grad()
def logit_lens(model: Model, ids: Sequence[int] | Tensor, top: int = 5) -> LogitLens:
    """Compute the predictions of each layer: the residual stream through the final norm and the head.

    Args:
        model: whole, as `forge_core.load_model` returns it without `parallel`.
        ids: (S), a prompt.
        top: N.
    """
    device = next(model.parameters()).device
    batch = model.prepare({"input_ids": torch.as_tensor(ids, device=device).view(1, -1)})
    carry = model.embed(batch)
    rows = [_log_probabilities(model, model.finish(carry, batch))]
    for layer in model.layers.values():
        carry = layer(carry, batch)
        rows.append(_log_probabilities(model, model.finish(carry, batch)))
    logs = torch.stack(rows)
    best = logs.topk(min(top, logs.shape[-1]), -1)
    names = ["embed", *(f"layers.{name}.resid_post" for name in model.layers)]
    entropy = -(logs.exp() * logs).sum(-1)
    # From the last row to the others, which is 0 at the last row
    divergence = (logs[-1].exp() * (logs[-1] - logs)).sum(-1)
    return LogitLens(names, best.indices, best.values.exp(), entropy, divergence)


def _log_probabilities(model: Model, hidden: Tensor) -> Tensor:
    """(1, S, D) to (S, V)."""
    with model.head.whole(hidden.dtype):
        logits = model.head.logits(hidden)[0]
    # At least float32: the divergence of late layers is small against the rounding of bfloat16
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
