"""What the component `tensorboard` builds."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter


class TensorBoardLogger:
    """See `forge_core.protocols.Logger`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def start(self, step: int) -> None:
        """Open a further file; TensorBoard then hides what earlier ones hold beyond `step`, or all if it is 0."""
        first_stale = step + 1 if step else 0
        self._writer = SummaryWriter(str(self._folder), purge_step=first_stale)

    def log(self, record: Mapping[str, Any]) -> None:
        for name, value in record.items():
            if name != "step" and isinstance(value, Real):
                self._writer.add_scalar(_tag(name), value, record["step"])
        if "loss" not in record:
            self._writer.flush()

    def flush(self) -> None:
        """A checkpoint follows: what is still in the writer's queue would be lost with the process."""
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _tag(name: str) -> str:
    return name if "/" in name else f"train/{name}"
