"""Attention within documents by torch's `varlen_attn` (CUDA, half precision), with bounds instead of a mask.

Shapes: B sequences, S positions, H query heads, K key/value heads, E width of a head, V width of its values.
"""

from __future__ import annotations

from functools import partial
from typing import cast

from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from forge_plugin_transformer.modules.narrow_values import narrowed, padded
from forge_plugin_transformer.scoring import PLAIN, Scoring

CAUSAL = (-1, 0)
"""Positions that one sees: everything before it, nothing after."""


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scoring: Scoring = PLAIN) -> Tensor:
    """Causal attention within each document: q (B, S, H, E), k (B, S, K, E), v (B, S, K, V) -> (B, S, H, V).

    Args:
        q: queries.
        k: keys.
        v: values.
        bounds: see `forge_plugin_transformer.modules.documents.document_bounds`.
        scoring: window and scale of scores.
    """
    width, v = v.shape[-1], padded(v, k, "flash")
    length, repeats = q.shape[1], q.shape[2] // k.shape[2]
    if repeats > 1:  # torch 2.11 does not support grouped heads here
        k, v = (tensor.repeat_interleave(repeats, 2) for tensor in (k, v))
    shape, (q, k, v) = q.shape, (tensor.flatten(0, 1) for tensor in (q, k, v))
    window = scoring.window_in(length)
    seen = (window - 1, 0) if window else CAUSAL  # in addition to itself
    attend = varlen_attn if scoring.given_scale is None else partial(varlen_attn, scale=scoring.given_scale)
    mixed = attend(q, k, v, bounds, bounds, length, length, window_size=seen)
    return narrowed(cast("Tensor", mixed).view(shape), width)
