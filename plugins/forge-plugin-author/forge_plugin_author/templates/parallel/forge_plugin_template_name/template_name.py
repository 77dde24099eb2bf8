"""The component template_name: its keys in a job file."""

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
    """Recomputes the activations of some layers in the backward pass (Chen et al. 2016).

    It takes less memory, and losses and gradients stay the same.
    """

    after: ClassVar[Mapping[str, str]] = {
        "pp": "only the layers that this rank keeps are changed",
        "tp": "its collectives are part of the recomputation",
        "cp": "its collectives are part of the recomputation",
        "float8": "it changes linear layers, and the changed ones must be recomputed",
    }
    before: ClassVar[Mapping[str, str]] = {"fsdp": "the recomputation must not gather the weights twice"}

    every: int = field(default=2, validator=ge(1))
    """Every n-th layer is recomputed, beginning with the first; 1: all."""

    def build(self, context: BuildContext) -> ParallelStage:
        from forge_plugin_template_name.recompute import RecomputeStage

        return RecomputeStage(self.every, context.auxiliary)
