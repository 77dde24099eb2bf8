"""Which checkpoint a run starts from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from forge_core.checkpoint.manager import MANIFEST, Checkpoints, verify
from forge_core.checkpoint.storage import LocalStorage
from forge_core.errors import CheckpointError


def find_checkpoint(
    resume: str, checkpoints: Checkpoints, how: Literal["full", "sizes"]
) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint that `resume` means, verified, with its manifest; None to start from nothing.

    Args:
        resume: `auto`, `never`, or a path (see `forge_core.engine.trainer.Trainer`).

    Raises:
        CheckpointError: there is none where a path says so, there is one though `never`, or none is intact.
    """
    if resume == "never":
        steps = checkpoints.steps()
        if steps:
            hint = "choose another job.name, delete the folder, or continue it with --resume auto"
            raise CheckpointError(f"this run folder has checkpoints already (steps {steps}); {hint}")
        return None
    newest = checkpoints.newest()
    if resume == "auto" or newest is not None:
        return newest
    return locate(Path(resume), how)


def locate(path: Path, how: Literal["full", "sizes"]) -> tuple[Path, dict[str, Any]]:
    """The checkpoint at `path`, or the newest one of the run folder `path`, verified, with its manifest.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    if (path / MANIFEST).is_file() or re.fullmatch(r"step-\d+", path.name):
        return path, verify(path, how)
    found = Checkpoints(LocalStorage(path / "checkpoints"), 0, how).newest()
    if found is None:
        raise CheckpointError(f"{path} is neither a checkpoint nor a run folder with checkpoints")
    return found
