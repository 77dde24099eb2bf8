"""The core's own owner of gradient reduction: whole copies of the model, gradients summed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from attrs import field, frozen

from forge_core.contracts.components import ParallelComponent, positive_or_auto
from forge_core.contracts.runtime import ParallelStage

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.model import Model


@frozen(kw_only=True)
class Replicate(ParallelComponent):
    """Every rank holds the whole model; gradients are summed over the token dimensions once a step."""

    owns_reduction: ClassVar[bool] = True

    replicate: int | Literal["auto"] = field(default="auto", validator=positive_or_auto)
    """Ranks that hold copies; auto takes what other stages leave over."""

    def degrees(self) -> Mapping[str, int | str]:
        return {"replicate": self.replicate}

    def build(self, context: BuildContext) -> ParallelStage:
        return ReplicateStage(context)


class ReplicateStage(ParallelStage):
    """Leaves the model as it is, and sums its gradients once all micro-batches of a step are done."""

    def __init__(self, context: BuildContext) -> None:
        self._mesh = context.mesh
        self._alone = context.layout.token_ranks == 1

    def complete_gradients(self, model: Model) -> None:
        """Sum every gradient over the token dimensions."""
        # Not in a hook of the backward pass: gradients accumulate over micro-batches first, for one reduction a step.
        from forge_core.parallel.mesh import all_reduce_tokens, sum_gradients

        if not self._alone:
            sum_gradients(model.parameters(), lambda flat: all_reduce_tokens(flat, self._mesh))
