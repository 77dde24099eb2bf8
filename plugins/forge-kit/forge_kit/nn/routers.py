"""The kind `router`: which experts a token is sent to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from attrs import frozen

from forge_core.contracts.components import Component
from forge_core.contracts.errors import Problem

if TYPE_CHECKING:
    from torch import nn

    from forge_core.contracts.contexts import BuildContext


@frozen(kw_only=True)
class RouterComponent(Component["nn.Module"]):
    """Builds the module that assigns tokens to experts.

    It maps `(x (B, S, D), batch)` to the weights, float32 or wider, and the numbers of K experts for each token, both
    (B, S, K). -1 means no expert, and needs an attribute `leaves_out = True`. Its attribute `experts_per_token` is
    their mean number. Losses attach to the weights (`context.auxiliary.attach`).
    """

    kind = "router"

    def expert_problems(self, experts: int) -> Iterable[Problem]:
        """Mistakes that show once the number of experts is known; paths as for `problems`."""
        return ()

    def build(self, context: BuildContext, dim: int, experts: int) -> nn.Module:
        """Build the router of layer `context.layer`, for tokens of width `dim` and a number of routed `experts`."""
        raise NotImplementedError
