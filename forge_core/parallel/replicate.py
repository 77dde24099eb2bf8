"""The core's own owner of gradient reduction: whole copies of the model, gradients summed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from attrs import field, frozen

from forge_core.contracts.components import ParallelComponent

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.runtime import ParallelStage


def _positive_or_auto(_: object, attribute: object, value: int | str) -> None:
    if value != "auto" and (not isinstance(value, int) or value < 1):
        raise ValueError(f"must be at least 1 or 'auto', got {value!r}")


@frozen(kw_only=True)
class Replicate(ParallelComponent):
    """Every rank holds the whole model; gradients are summed over the token dimensions once a step."""

    owns_reduction: ClassVar[bool] = True

    replicate: int | Literal["auto"] = field(default="auto", validator=_positive_or_auto)
    """Ranks that hold copies; auto takes what other stages leave over."""

    def degrees(self) -> Mapping[str, int | str]:
        return {"replicate": self.replicate}

    def build(self, context: BuildContext) -> ParallelStage:
        from forge_core.parallel.replicate_stage import ReplicateStage

        return ReplicateStage(context)
