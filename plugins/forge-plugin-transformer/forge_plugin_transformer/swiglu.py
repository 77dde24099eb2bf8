"""Feed-forward `swiglu`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge

from forge_plugin_transformer.kinds import FFNComponent, InitStd

if TYPE_CHECKING:
    from torch import nn

    from forge_core.contracts.contexts import BuildContext

ROUNDING = 256
"""The derived hidden width is a multiple of this, as accelerators like it."""


@frozen(kw_only=True)
class SwiGLU(FFNComponent):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    hidden: int = field(default=0, validator=ge(0))
    """Width between the matrices; 0: 8/3 of `dim`, rounded up to a multiple of 256."""
    bias: bool = False
    """Whether the three matrices have biases."""

    def build(self, context: BuildContext, dim: int, init: InitStd) -> nn.Module:
        from forge_plugin_transformer.modules import feed_forward

        return feed_forward.SwiGLU(dim, self.hidden or default_hidden(dim), bias=self.bias, init=init)


def default_hidden(dim: int) -> int:
    """8/3 of `dim`, so that three matrices have as many elements as the two of a plain feed-forward of 4 `dim`."""
    return -(-8 * dim // (3 * ROUNDING)) * ROUNDING
