"""The plugin `ema`."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING

from attrs import define, field
from attrs.validators import ge, gt, lt

from forge_core import Job, Plugin, Problem, hookimpl

if TYPE_CHECKING:
    import torch


@define(kw_only=True, slots=False)
class EMA(Plugin):
    """Exponential moving average of the weights (Polyak and Juditsky 1992), with any optimizer.

    average <- decay x average + (1 - decay) x weights after each update, from the initial weights on. Evaluation,
    generation, export and other runs use the average; training continues with its own weights.

    State: one tensor like each trained parameter, split over ranks like it.
    """

    decay: float = field(default=0.999, validator=[gt(0), lt(1)])
    """Share of the average that an update keeps; the average then spans about 1 / (1 - decay) updates."""
    warmup: bool = True
    """Whether the first updates weigh more, so that the initial weights soon lose theirs: the decay is at most
    (1 + n) / (10 + n) after n updates."""
    updates: int = field(default=0, init=False, validator=ge(0))
    """Updates averaged so far."""

    @hookimpl
    def forge_validate_job(self, job: Job) -> Iterable[Problem]:
        """Refuses parameters in bf16, and optimizers that have weights for evaluation already."""
        if job.optimizer.parameter_dtype == "bf16":
            reason = "an average of parameters in bf16 would be kept in bf16, where its small changes are lost"
            yield Problem("plugins.ema", f"{reason}; keep parameters in float32, or leave the plugin out")
        if job.optimizer.has_evaluation_weights:
            reason = f"{type(job.optimizer).__name__} has its own weights for evaluation"
            yield Problem("plugins.ema", f"{reason}; leave out one of the two")

    @hookimpl(wrapper=True)
    def forge_build_optimizer(self) -> Generator[None, torch.optim.Optimizer, torch.optim.Optimizer]:
        """Lets the optimizer be built by its own component, and makes it average (`with_average`)."""
        from forge_plugin_ema.averaging import with_average

        optimizer = yield
        return with_average(optimizer, self)

    def next_decay(self) -> float:
        """Count an update, and return the decay for averaging it."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.warmup else self.decay
        self.updates += 1
        return decay
