"""What the component `curves` builds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_plugin_curves.history import History


class CurvesLogger:
    """See `forge_core.protocols.Logger`."""

    def __init__(self, picture: Path, lines: Path | None, title: str, smoothing: float) -> None:
        """`lines`: the JSON lines of the run, where its past is found when it is continued."""
        self._picture, self._lines, self._title, self._smoothing = picture, lines, title, smoothing
        self._history = History()

    def start(self, step: int) -> None:
        self._history = History.read(self._lines, step) if self._lines else History()

    def log(self, record: Mapping[str, Any]) -> None:
        self._history.add(record)
        if any(name.startswith("eval/") for name in record):
            self._draw()

    def close(self) -> None:
        self._draw()

    def _draw(self) -> None:
        from forge_plugin_curves.picture import (
            draw,  # matplotlib takes a moment, which the first step need not wait for
        )

        if len(self._history):
            draw(self._history, self._title, self._smoothing, self._picture)
