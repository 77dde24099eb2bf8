"""The hook template_name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import define, field
from attrs.validators import ge

from forge_core import JobError, TrainingHook

if TYPE_CHECKING:
    from forge_core.contracts.contexts import StepContext


@define(kw_only=True, slots=False)
class TemplateName(TrainingHook):
    """Stops a run whose evaluations have not improved for a while; the state is saved."""

    metric: str = "eval/loss"
    """The metric that must fall."""
    patience: int = field(default=3, validator=ge(1))
    """Evaluations in a row without a new lowest value, after which the run stops."""

    best: float = field(init=False, default=math.inf)
    """State, which is part of checkpoints: the lowest value so far."""
    waited: int = field(init=False, default=0)
    """Likewise: evaluations since then."""

    def on_eval_end(self, context: StepContext, metrics: Mapping[str, float]) -> None:
        if self.metric not in metrics:
            raise JobError(f"there is no metric {self.metric!r}; evaluations give {', '.join(metrics) or 'none'}")
        if metrics[self.metric] < self.best:
            self.best, self.waited = metrics[self.metric], 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            context.request_stop(f"{self.metric} was lowest {self.waited} evaluations ago")
