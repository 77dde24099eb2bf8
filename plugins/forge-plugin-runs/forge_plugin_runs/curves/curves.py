"""The component `curves`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from attrs import define, field, frozen
from attrs.validators import ge

from forge_core.contracts.components import LoggerComponent, TrainingHook
from forge_core.metrics.jsonl import JsonLines

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext, StepContext
    from forge_core.contracts.runtime import Logger
    from forge_core.job import Job


@frozen(kw_only=True)
class Curves(LoggerComponent):
    """Draws a picture in the run folder: losses, held-out bits per byte, learning rate and gradient norm.

    Below them are the counts of layers, such as tokens per expert, as a row of squares a layer.

    It is redrawn at each evaluation, when loggers that take files get it, and at the end. A picture that cannot be
    drawn is a warning with the reason, and training continues: the numbers are in the lines of metrics, from which the
    next picture is complete again.
    """

    file: str = "curves.png"
    """Path of the picture, relative to the run folder."""
    smoothing: int = field(default=0, validator=ge(0))
    """Steps over which loss and gradient norm are averaged for the strong lines; 0: a hundredth of the run."""

    def training_hooks(self, job: Job) -> Iterable[TrainingHook]:
        """A hook that passes the picture on, as a logger cannot reach the other loggers."""
        return [SharedPicture(file=self.file)]

    def build(self, context: BuildContext) -> Logger:
        """Returns a logger that reads earlier lines from the file of the job's `jsonl` logger."""
        from forge_plugin_runs.curves.logger import CurvesLogger

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


@define(kw_only=True, slots=False)
class SharedPicture(TrainingHook):
    """Hands the picture of each evaluation to the loggers that take files."""

    resumes_as = "safe"

    file: str

    def on_eval_end(self, context: StepContext, metrics: Mapping[str, float]) -> None:
        """Passes on the picture, which the logger has redrawn at the line of this evaluation."""
        # After the line of the evaluation, with which it was drawn; it exists on rank 0, unless that failed.
        if context.folder is not None and (path := context.folder / self.file).is_file():
            context.log_artifact(path)


def _metrics_file(job: Job) -> str:
    """Returns the file of the job's `jsonl` logger, from which a continued run reads earlier lines."""
    return next((logger.file for logger in job.loggers.values() if isinstance(logger, JsonLines)), JsonLines().file)
