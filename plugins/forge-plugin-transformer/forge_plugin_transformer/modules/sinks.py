"""Sinks of attention: scores that take part in the softmax and have no value, one for each query head (gpt-oss).

With normaliser Z = sum over keys of exp(score) and sink s, weights are exp(score) / (Z + exp(s)): plain attention's
weights times sigmoid(log Z - s), so that a head may attend to nothing. A backward pass of plain attention that is
given the result and log(Z + exp(s)) in place of log Z computes the gradients of queries, keys and values as they are,
as the sink's value is zero.

Shapes: B sequences, S query positions, H query heads, V width of values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from forge_core.contracts.model import Fill


class HeadSinks(nn.Module):
    """The learned sinks (H,) of a layer's heads. A separate module, which tensor parallel splits like its heads."""

    def __init__(self, heads: int, std: float) -> None:
        super().__init__()
        self.std = std
        self.weight = nn.Parameter(torch.empty(heads))

    def init_parameter(self, name: str, fill: Fill) -> None:
        """Draws sinks from N(0, std²), with the deviation of the layer's inner matrices."""
        fill.normal(self.std)

    def init_buffers(self, device: torch.device) -> None:
        """There are none."""

    def forward(self, dtype: torch.dtype) -> Tensor:
        """Returns the sinks (H,) in `dtype`; with tensor parallel, of this rank's heads."""
        return self.weight.to(dtype)


def empty_normalisers(q: Tensor, sinks: Tensor | None) -> Tensor:
    """Allocates the normalisers (B, S, H) of q (B, S, H, E), of size 0 without sinks."""
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(0 if sinks is None else q.shape[:3], dtype=wide)


def add_sinks(out: Tensor, normalisers: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns result and normalisers with sinks, of those without.

    Args:
        out: (B, S, H, V), result of attention.
        normalisers: (B, S, H), logarithm of each softmax's normaliser, float32 or wider.
        sinks: (H,).
    """
    # Not the logarithm of a sum of exponentials, which overflow for large scores
    total = torch.logaddexp(normalisers, sinks.to(normalisers.dtype))
    return (out * (normalisers - total).exp_().unsqueeze(-1)).to(out.dtype), total


def sinks_gradient(grad: Tensor, out: Tensor, normalisers: Tensor, sinks: Tensor) -> Tensor:
    """Returns the gradient of sinks (H,).

    Args:
        grad: (B, S, H, V), gradient of the result.
        out: (B, S, H, V), the result.
        normalisers: (B, S, H), with sinks.
        sinks: (H,).
    """
    wide = normalisers.dtype
    # The sink's own weight; d out / d sink = -share * out, as a larger sink takes weight from all values in proportion
    share = (sinks.to(wide) - normalisers).exp_()
    return -(share * (grad.to(wide) * out.to(wide)).sum(-1)).sum((0, 1)).to(sinks.dtype)
