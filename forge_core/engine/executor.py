"""The plain executor: micro-batches one after the other on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import frozen

from forge_core.contracts.components import ExecutorComponent

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.model import Model
    from forge_core.contracts.runtime import Executor, LossFunction, ParallelStage


@frozen(kw_only=True)
class Plain(ExecutorComponent):
    """Forward and backward of one micro-batch after the other."""

    def build(
        self, context: BuildContext, model: Model, loss: LossFunction, stages: Sequence[ParallelStage]
    ) -> Executor:
        from forge_core.engine.plain_executor import PlainExecutor

        return PlainExecutor(model, loss, stages)
