"""`[model.mtp]`: multi-token prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from attrs import define, field, frozen
from attrs.validators import ge

from forge_core.contracts.components import LossComponent, SchedulerComponent, TrainingHook, default_type, when_resumed
from forge_core.contracts.errors import Problem

if TYPE_CHECKING:
    from forge_core.config.job import Job
    from forge_core.contracts.contexts import BuildContext, StepContext


def _weight(_: object, attribute: Any, value: float | SchedulerComponent) -> None:
    if not isinstance(value, SchedulerComponent) and value < 0:
        raise ValueError(f"must be >= 0, or a schedule, got {value}")


@frozen(kw_only=True)
class MultiTokenPrediction:
    """Modules that predict tokens after the next, one after the other (DeepSeek-V3, arXiv 2412.19437, section 2.2).

    Module k has a norm for the states of the module before (those of the model, for the first), one for the embedding
    of the k-th next token, a matrix that joins the two, a block like the model's layers, and a last norm. Embedding and
    head are the model's. Its targets are the labels k positions on, in the same document. Modules are there in
    training only: the reported loss, evaluations and generation are the model's own.
    """

    depth: int = field(default=1, validator=ge(1))
    """Modules, each of which predicts one token further ahead."""
    weight: float | SchedulerComponent = field(default=0.3, validator=_weight, metadata=when_resumed("flag"))
    """Factor on the mean of the modules' losses in the objective: with one module, what a target weighs beside one of
    the next token. A table makes it a schedule, whose values it takes; the value of a step is logged as `mtp/weight`.
    DeepSeek-V3 has 0.3 for two thirds of its tokens, then 0.1."""
    loss: LossComponent = default_type("forge-plugin-losses/chunked_cross_entropy")
    """`[model.mtp.loss]`: the loss of a module. Only its objective counts: what else it logs is not logged."""

    def weights(self, context: BuildContext) -> Callable[[int], float]:
        """Completed steps -> weight of the next."""
        weight = self.weight
        if not isinstance(weight, SchedulerComponent):
            return lambda completed: weight
        schedule, total = context.build(weight), context.job.train.steps
        return lambda completed: schedule(completed, total)

    def problems(self, job: Job) -> Iterable[Problem]:
        """Paths are relative to this table."""
        if self.depth >= job.train.seq_len:
            seen = f"{self.depth} leaves no targets: sequences have train.seq_len = {job.train.seq_len} positions"
            yield Problem("depth", f"{seen}; lower it, or lengthen them")


@define(kw_only=True, slots=False)
class PredictionWeight(TrainingHook):
    """Gives the modules of multi-token prediction the weight that its schedule has for a step."""

    def on_step_begin(self, context: StepContext) -> None:
        from forge_plugin_transformer.modules.multi_token import Predictions

        for module in context.model.modules():  # type: ignore[attr-defined]
            if isinstance(module, Predictions):
                module.begin_step(context.step - 1)
