"""The component template_name: its keys in a job file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import min_len

from forge_core import ExecutorComponent

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.model import Model
    from forge_core.contracts.runtime import Executor, LossFunction, ParallelStage


@frozen(kw_only=True)
class TemplateName(ExecutorComponent):
    """Runs micro-batches one after the other, each under a label that torch's profiler shows."""

    label: str = field(default="micro-batch", validator=min_len(1))
    """Prefix of labels; the number of the micro-batch follows, and whether it is forward or backward."""

    def build(
        self, context: BuildContext, model: Model, loss: LossFunction, stages: Sequence[ParallelStage]
    ) -> Executor:
        from forge_plugin_template_name.label_executor import LabelledExecutor

        return LabelledExecutor(model, loss, stages, self.label)
