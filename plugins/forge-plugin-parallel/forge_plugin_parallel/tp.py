"""The component `tp`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

from attrs import field, frozen
from attrs.validators import ge

from forge_core.contracts.components import ParallelComponent
from forge_core.contracts.errors import Problem

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.model import Model
    from forge_core.contracts.runtime import ParallelStage
    from forge_core.job import Job


@frozen(kw_only=True)
class TensorParallel(ParallelComponent):
    """Tensor parallel (Megatron-LM, Shoeybi et al. 2019): `degree` ranks share each matrix and compute the same tokens.

    For models that declare a `tensor_parallel_plan()`.
    """

    after: ClassVar[Mapping[str, str]] = {
        "pp": "only the layers that this rank keeps are split",
        "float8": "it replaces linear layers, and tp must split the replacements",
    }

    degree: int = field(validator=ge(1))
    """Ranks that share each matrix. Divides heads, key/value heads, the width of feed-forward layers, and the
    vocabulary."""
    sequence_parallel: bool = True
    """Whether each rank keeps only its part of the sequence between the split matrices (Korthikanti et al. 2022): less
    memory, equal communication. `degree` then divides `train.seq_len`."""
    loss_parallel: bool = True
    """Whether each rank computes the loss on its part of the vocabulary, so that no rank holds all logits."""

    def degrees(self) -> Mapping[str, int | str]:
        return {"tp": self.degree}

    def divided_axes(self) -> Mapping[str, Collection[str]]:
        """Heads and hidden features; with sequence parallel, positions between blocks too."""
        return {"tp": ("heads", "hidden", "rest") if self.sequence_parallel else ("heads", "hidden")}

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that sequence parallel divides a sequence into equal parts."""
        if self.sequence_parallel and job.train.seq_len % self.degree:
            message = f"{self.degree} does not divide train.seq_len = {job.train.seq_len}"
            yield Problem("degree", f"{message}; change one, or set sequence_parallel = false")

    def model_problems(self, model: Model, layout: Layout) -> Iterable[Problem]:
        """Checks the model's plan, and that the ranks divide each dimension that it splits."""
        from forge_plugin_parallel.tp_plan import plan_problems

        return plan_problems(model, self.degree)

    def build(self, context: BuildContext) -> ParallelStage:
        from forge_plugin_parallel.tp_stage import TensorParallelStage

        return TensorParallelStage(self, context)
