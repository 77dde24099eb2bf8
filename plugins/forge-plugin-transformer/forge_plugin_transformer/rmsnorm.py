"""Norm `rmsnorm`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import gt

from forge_core.contracts.components import when_resumed
from forge_plugin_transformer.kinds import NormComponent

if TYPE_CHECKING:
    from torch import nn

    from forge_core.contracts.contexts import BuildContext


@frozen(kw_only=True)
class RMSNorm(NormComponent):
    """Scales by the root mean square, without centring (Zhang & Sennrich 2019)."""

    eps: float = field(default=1e-5, validator=gt(0), metadata=when_resumed("flag"))
    """Added to the mean square."""

    def build(self, context: BuildContext, dim: int) -> nn.Module:
        from forge_plugin_transformer.modules import norms

        return norms.RMSNorm(dim, eps=self.eps)
