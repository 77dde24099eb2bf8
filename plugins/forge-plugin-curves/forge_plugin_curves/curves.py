"""The component `curves`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge

from forge_core.contracts.components import LoggerComponent
from forge_core.metrics.jsonl import JsonLines

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.runtime import Logger
    from forge_core.job import Job


@frozen(kw_only=True)
class Curves(LoggerComponent):
    """Keeps a picture in the run folder: losses, held-out bits per byte, learning rate and gradient norm.
    Below them, what layers count, such as the tokens of their experts: a row of squares a layer.

    It is drawn anew at each evaluation and at the end. A picture that cannot be drawn is a warning that says why, and
    training goes on: the numbers are in the lines of metrics, from which the next picture is whole again.
    """

    file: str = "curves.png"
    """Relative to the run folder."""
    smoothing: int = field(default=0, validator=ge(0))
    """Steps over which loss and gradient norm are averaged for the strong lines; 0: a hundredth of the run."""

    def build(self, context: BuildContext) -> Logger:
        from forge_plugin_curves.logger import CurvesLogger

        assert context.folder is not None
        job = context.job
        return CurvesLogger(
            path=context.folder / self.file,
            metrics=context.folder / _metrics_file(job),
            title=job.job.name,
            total_steps=job.train.steps,
            clip_norm=job.train.grad_clip_norm,
            horizon=self.smoothing or max(1, job.train.steps // 100),
        )


def _metrics_file(job: Job) -> str:
    """Where the job's `jsonl` writes: what a continued run reads its past from."""
    return next((logger.file for logger in job.loggers.values() if isinstance(logger, JsonLines)), JsonLines().file)
