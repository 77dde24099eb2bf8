"""What the component `tensorboard` builds."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter


class TensorBoardLogger:
    """See `forge_core.protocols.Logger`."""

    def __init__(self, folder: Path, flush_seconds: int) -> None:
        self._folder = folder
        self._flush_seconds = flush_seconds

    def start(self, step: int) -> None:
        """What an earlier process recorded after `step` is hidden by TensorBoard from now on."""
        purge = step + 1 if self._folder.exists() else None
        self._writer = SummaryWriter(str(self._folder), purge_step=purge, flush_secs=self._flush_seconds)

    def log(self, record: Mapping[str, Any]) -> None:
        """Training numbers get the prefix `train/`; those that name a group themselves (`eval/loss`) keep it."""
        for name, value in record.items():
            if name != "step" and isinstance(value, Real):
                self._writer.add_scalar(name if "/" in name else f"train/{name}", value, record["step"])
        if any(name.startswith("eval/") for name in record):
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()
