"""The component template_name: its keys in a job file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge

from forge_core import Problem
from forge_core.contracts.components import RouterComponent

if TYPE_CHECKING:
    from torch import nn

    from forge_core.contracts.contexts import BuildContext


@frozen(kw_only=True)
class TemplateName(RouterComponent):
    """Sends each token to the experts with the highest scores, weighted by the softmax over their scores."""

    top_k: int = field(default=2, validator=ge(1))
    """Experts of a token."""

    def expert_problems(self, experts: int) -> Iterable[Problem]:
        if self.top_k > experts:
            yield Problem("top_k", f"{self.top_k}, but there are {experts} experts; lower it")

    def build(self, context: BuildContext, dim: int, experts: int) -> nn.Module:
        from forge_plugin_template_name.gate import Gate

        return Gate(dim, experts, self.top_k)
