"""Attention as it is defined, for what torch's kernels do not compute: sinks, and capped scores.

Shapes: B sequences, S query positions, T key positions, H query heads in K groups of R, E width of a head, V that of
its values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge_plugin_transformer.scoring import Scoring


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scoring: Scoring, sinks: Tensor | None = None
) -> Tensor:
    """Attention by all scores at once: q (B, S, H, E), k (B, T, K, E), v (B, T, K, V) -> (B, S, H, V).

    Args:
        q: queries.
        k: keys.
        v: values.
        mask: (B or 1, 1, S, T), true where a position may attend; None: causal, with S = T. It has the window.
        scoring: scale and cap of scores.
        sinks: (H,) scores without a value, see `forge_plugin_transformer.modules.sinks`.
    """
    groups, factor = k.shape[2], scoring.factor(q.shape[-1])
    q = q.unflatten(2, (groups, -1)).movedim(1, 3)  # (B, K, R, S, E)
    k, v = (tensor.transpose(1, 2).unsqueeze(2) for tensor in (k, v))  # (B, K, 1, T, E)
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * factor
    if scoring.soft_cap:
        scores = (scores / scoring.soft_cap).tanh() * scoring.soft_cap
    if mask is None:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
    else:
        hidden = mask.logical_not().unsqueeze(2)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, groups, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : k.shape[-2]].to(v.dtype)
    return (weights @ v).movedim(3, 1).flatten(2, 3)
