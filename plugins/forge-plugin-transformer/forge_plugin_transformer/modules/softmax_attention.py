"""Attention as it is defined, for what torch's kernels do not compute: sinks, and capped scores.

Shapes: B sequences, S query positions, T key positions, H query heads in K groups of R, E width of a head, V width
of its values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forge_plugin_transformer.scoring import Scoring

WHOLE = torch.ones(1, 1, 1, 1, dtype=torch.bool, device="cpu")
"""Stands for a mask that hides nothing from a single position. Code goes by its identity, not by its value."""


class _ContiguousGradient(torch.autograd.Function):
    """The same tensor, whose gradient is contiguous.

    The gradient of keys, (B, T, K, E), comes from a product transposed twice, and is "channels last" to torch. `roll`,
    with which positions are encoded, keeps that order, but its fake implementation does not (torch 2.13), so that a
    compiled graph fails with "view size is not compatible".
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()


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
    groups, repeats, length = k.shape[2], q.shape[2] // k.shape[2], q.shape[1]
    q, k, v = (_ContiguousGradient.apply(tensor) for tensor in (q, k, v))  # type: ignore[no-untyped-call]
    # The heads of a group are rows of one product, (B, K, R S, E) with (B, K, T, E), so that no key is repeated.
    rows = q.unflatten(2, (groups, repeats)).movedim(1, 3).flatten(2, 3)
    k, v = (tensor.transpose(1, 2) for tensor in (k, v))
    products = (rows @ k.mT).unflatten(2, (repeats, length))
    scores = products.to(torch.promote_types(q.dtype, torch.float32)) * scoring.factor(q.shape[-1])
    if scoring.soft_cap:
        scores = (scores / scoring.soft_cap).tanh() * scoring.soft_cap
    if mask is None:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores = scores.masked_fill(later, -torch.inf)
    elif mask is not WHOLE:
        scores = scores.masked_fill(mask.logical_not().unsqueeze(2), -torch.inf)
    if sinks is not None:
        # A key more, whose weight is dropped after the softmax, as it has no value
        column = sinks.to(scores.dtype).view(1, groups, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : k.shape[-2]].to(v.dtype)
    return (weights.flatten(2, 3) @ v).unflatten(2, (repeats, length)).movedim(3, 1).flatten(2, 3)


def one_query_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scoring: Scoring) -> Tensor:
    """Plain attention of one query: q (B, 1, H, E), k (B, T, K, E), v (B, T, K, V), mask (B, 1, 1, T) -> (B, 1, H, V).

    Scores are in the dtype of q. The mask has the window.
    """
    rows, groups, width = len(q), k.shape[2], v.shape[-1]
    q = q.reshape(rows * groups, -1, q.shape[-1])  # the heads of a group are rows of one product: no key is repeated
    k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (k, v))
    factor = scoring.factor(q.shape[-1])
    if mask is WHOLE:
        # With beta = 0 torch ignores the first argument, whatever it contains; only the factor is of use here
        scores = torch.baddbmm(q.new_empty(1, 1, 1), q, k.mT, beta=0, alpha=factor)
    else:
        # The product adds the mask: one operation where a call costs as much as the arithmetic
        bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(mask.logical_not(), -torch.inf)
        scores = torch.baddbmm(bias.expand(rows, groups, 1, -1).flatten(0, 1), q, k.mT, alpha=factor)
    return torch.bmm(scores.softmax(-1), v).view(rows, 1, -1, width)
