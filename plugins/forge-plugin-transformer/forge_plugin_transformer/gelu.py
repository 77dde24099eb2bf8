"""Feed-forward `gelu`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from attrs import field, frozen
from attrs.validators import ge

from forge_plugin_transformer.kinds import FFNComponent, InitStd

if TYPE_CHECKING:
    from torch import nn

    from forge_core.contracts.contexts import BuildContext


@frozen(kw_only=True)
class GELU(FFNComponent):
    """down(gelu(up(x))), as in GPT-2."""

    hidden: int = field(default=0, validator=ge(0))
    """Width between the matrices; 0: 4 times `dim`."""
    bias: bool = False
    """Whether the two matrices have biases."""
    approximate: Literal["tanh", "none"] = "tanh"
    """The activation by its tanh approximation (GPT-2), or exactly."""

    def build(self, context: BuildContext, dim: int, init: InitStd) -> nn.Module:
        from forge_plugin_transformer.modules import feed_forward

        hidden = self.hidden or 4 * dim
        return feed_forward.GELU(dim, hidden, bias=self.bias, approximate=self.approximate, init=init)
