"""What a checkpoint holds, and its weights alone, for programs that do not continue its run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from forge_core.checkpoint.state import EVALUATION, MODEL, model_tensors
from forge_core.checkpoint.tensors import load_tensors, read_index, shared_index

if TYPE_CHECKING:
    import torch

    from forge_core.contracts.model import Model


def stored_tensors(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Name -> (shape, dtype) of every tensor in a checkpoint, read by this process.

    Raises:
        CheckpointError: the index is missing, or not of the form that this version reads.
    """
    return read_index(folder).shapes


def load_model(folder: Path, model: Model) -> None:
    """Only the weights of a checkpoint, as they are evaluated."""
    index = shared_index(folder)
    where = evaluated_names(index.shapes)
    tensors = {where.get(name, MODEL + name): tensor for name, tensor in model_tensors(model).items()}
    load_tensors(folder, tensors, index)


def evaluated_names(stored: Iterable[str]) -> dict[str, str]:
    """Name of each parameter and buffer in the model -> name in a checkpoint of its weights as they are evaluated."""
    trained = {name.removeprefix(MODEL): name for name in stored if name.startswith(MODEL)}
    others = {name.removeprefix(EVALUATION): name for name in stored if name.startswith(EVALUATION)}
    # Evaluated weights, an average say, take the place of trained ones; there need not be one of each tensor
    return trained | others
