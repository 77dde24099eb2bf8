"""Attention `short_conv`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import gt

from forge_plugin_transformer import AttentionComponent, InitStd

if TYPE_CHECKING:
    from torch import nn

    from forge_core.contracts.contexts import BuildContext


@frozen(kw_only=True)
class ShortConv(AttentionComponent):
    """The gated short convolution of LFM2 (Liquid AI 2025, arXiv 2511.23404, section 2.1).

    A position sees the last `conv` positions, feature by feature, between two gates that are linear in x:

        y = o (c * conv(b * v)),  where b, c and v are projections of x to the width of the model

    It has no heads, no state but the last inputs of the convolution, and no encoding of positions. Beside softmax
    attention in some layers (a `pattern`), it takes the place of attention in the others. The convolution begins empty
    with each document, where the batch has `document_ids`.
    """

    conv: int = field(default=3, validator=gt(0))
    """Positions of the convolution, the present one included; 1: a factor for each feature."""

    def build(self, context: BuildContext, dim: int, init: InitStd) -> nn.Module:
        """Returns a `ShortConvolution`."""
        from forge_plugin_linear_attention.modules.short_convolution import ShortConvolution

        return ShortConvolution(dim, conv=self.conv, init=init)
