"""The component `curves`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import and_, ge, lt

from forge_core.components import LoggerComponent
from forge_core.metrics.jsonl import JsonLines

if TYPE_CHECKING:
    from forge_core.context import BuildContext
    from forge_core.protocols import Logger


@frozen(kw_only=True)
class Curves(LoggerComponent):
    """Keeps a picture of the run in its folder: loss, held-out bits per byte, learning rate and gradient norm.

    Drawn anew after each evaluation and at the end. A run that is continued keeps the part before.
    """

    file: str = "curves.png"
    """Relative to the run folder."""
    smoothing: float = field(default=0.02, validator=and_(ge(0), lt(1)))
    """Share of the steps so far over which the strong lines average; the light ones behind them are as measured."""

    def build(self, context: BuildContext) -> Logger:
        from forge_plugin_curves.logger import CurvesLogger

        assert context.folder is not None
        lines = next((logger.file for logger in context.job.loggers.values() if isinstance(logger, JsonLines)), None)
        return CurvesLogger(
            picture=context.folder / self.file,
            lines=context.folder / lines if lines else None,
            title=context.job.job.name,
            smoothing=self.smoothing,
        )
