"""What a checkpoint holds, for programs that look at one without loading it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from forge_core.checkpoint.tensors import read_index

if TYPE_CHECKING:
    import torch


def stored_tensors(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Name -> (shape, dtype) of every tensor in a checkpoint, read by this process.

    Raises:
        CheckpointError: the index is missing, or not of the form that this version reads.
    """
    return read_index(folder).shapes
