"""The logger `tensorboard`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.tensorboard import SummaryWriter

SQUARE = 8
"""Side of the square of one number, in pixels."""


class TensorBoardLogger:
    """See `forge_core.contracts.runtime.Logger`."""

    def __init__(self, folder: Path, picture_interval: int = 100) -> None:
        self._folder, self._picture_interval = folder, picture_interval

    def start(self, step: int) -> None:
        """Open another file; TensorBoard then hides values of earlier files beyond `step`, or all if it is 0."""
        first_stale = step + 1 if step else 0
        self._writer = SummaryWriter(str(self._folder), purge_step=first_stale)

    def log(self, record: Mapping[str, Any]) -> None:
        for name, value in record.items():
            if name not in ("step", "time") and isinstance(value, Real):
                self._writer.add_scalar(_tag(name), value, record["step"], walltime=record.get("time"))
        if record["step"] % self._picture_interval == 0:
            for name, rows in record.get("counts", {}).items():
                self._writer.add_image(name, heat_map(rows), record["step"], dataformats="HW")
        # Lines of evaluations are rare, and shown at once
        if "loss" not in record:
            self._writer.flush()

    def flush(self) -> None:
        """Write the queue before a checkpoint is saved: it would be lost with the process."""
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def heat_map(rows: Mapping[str, Sequence[float]]) -> np.ndarray:
    """Draws counts as a picture (height, width) of uint8, from the smallest of all (black) to the largest (white).

    Each row of counts is a row of squares; shorter rows end in their smallest shade.
    """
    widest = max(map(len, rows.values()))
    numbers = np.array([[*values, *[min(values)] * (widest - len(values))] for values in rows.values()])
    low, high = numbers.min(), numbers.max()
    # Where all numbers are equal, they are black, and nothing is divided by 0
    shades = np.uint8(255 * (numbers - low) / max(high - low, 1e-30))
    return np.kron(shades, np.ones((SQUARE, SQUARE), np.uint8))


def _tag(name: str) -> str:
    return name if "/" in name else f"train/{name}"
