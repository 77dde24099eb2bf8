"""What a job file says about template_name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge

from forge_core import JobError, Problem, RouterComponent

if TYPE_CHECKING:
    from torch import nn

    from forge_core.context import BuildContext


@frozen(kw_only=True)
class TemplateName(RouterComponent):
    """Each token goes to the experts with the highest scores, which share it by the softmax over their scores."""

    top_k: int = field(default=2, validator=ge(1))
    """Experts of a token."""

    def build(self, context: BuildContext, dim: int, experts: int) -> nn.Module:
        from forge_plugin_template_name.gate import Gate

        if self.top_k > experts:
            raise JobError([Problem("top_k", f"{self.top_k}, but the model has {experts} experts; lower it")])
        return Gate(dim, experts, self.top_k)
