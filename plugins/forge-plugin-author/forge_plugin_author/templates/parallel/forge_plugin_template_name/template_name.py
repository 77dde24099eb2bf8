"""What a job file says about template_name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from attrs import field, frozen
from attrs.validators import ge

from forge_core import ParallelComponent

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.runtime import ParallelStage


@frozen(kw_only=True)
class TemplateName(ParallelComponent):
    """Forgets what some layers computed on the way forward, and computes it again in the backward pass (Chen et al.
    2016): less memory, and the same losses and gradients.
    """

    after: ClassVar[Mapping[str, str]] = {
        "pp": "only the layers that this rank keeps are changed",
        "tp": "its collectives belong to what is computed again",
        "cp": "its collectives belong to what is computed again",
        "float8": "it changes linear layers, and what is computed again must be the changed ones",
    }
    before: ClassVar[Mapping[str, str]] = {"fsdp": "what is computed again must not gather the weights twice"}

    every: int = field(default=2, validator=ge(1))
    """Every n-th layer is computed again, beginning with the first; 1: all."""

    def build(self, context: BuildContext) -> ParallelStage:
        from forge_plugin_template_name.recompute import RecomputeStage

        return RecomputeStage(self.every, context.auxiliary)
