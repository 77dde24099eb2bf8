"""The logger `curves`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import define, field

from forge_plugin_runs.curves.history import History, read_lines


@define(kw_only=True)
class CurvesLogger:
    """See `forge_core.contracts.runtime.Logger`."""

    path: Path
    """Path of the picture."""
    metrics: Path
    """File of lines of metrics, from which a continued run reads the earlier ones."""
    title: str
    total_steps: int
    clip_norm: float
    horizon: int
    history: History = field(init=False)

    def start(self, step: int) -> None:
        """Reads the lines up to `step`, which an earlier process wrote; draws nothing yet."""
        self.history = History(self.horizon)
        for record in read_lines(self.metrics, step) if step else ():
            self.history.add(record)

    def log(self, record: Mapping[str, Any]) -> None:
        """Redraws the picture at the line of an evaluation; lines of steps are only kept."""
        self.history.add(record)
        if "loss" not in record:
            self._refresh()

    def close(self) -> None:
        """Redraws the picture, for the steps since the last evaluation."""
        self._refresh()

    def _refresh(self) -> None:
        if not len(self.history):  # a run that ended before its first step
            return
        try:
            from forge_plugin_runs.curves.panels import draw  # late: importing matplotlib would delay the first step

            draw(self.history, self.path, title=self.title, total_steps=self.total_steps, clip_norm=self.clip_norm)
        # Any error: training must not end because of a picture
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            warnings.warn(f"{self.path} is not up to date, it could not be drawn: {reason}", stacklevel=2)
