"""Whole tensors of a checkpoint, read by a single process on the host, some at a time."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from forge_core.checkpoint.tensors import load_tensors

Stored = Mapping[str, tuple[torch.Size, torch.dtype]]
"""Shape and dtype by name, as `forge_kit.tools.checkpoints.stored_tensors` returns them."""


def batches(names: Iterable[str], stored: Stored, limit: int) -> list[list[str]]:
    """Divides the names, in order, into parts whose tensors have at most `limit` bytes, or are a single one."""
    parts: list[list[str]] = []
    room = 0
    for name in names:
        size = tensor_bytes(stored, [name])
        if size > room or not parts:
            parts.append([])
            room = limit
        parts[-1].append(name)
        room -= size
    return parts


def tensor_bytes(stored: Stored, names: Iterable[str]) -> int:
    """Returns the bytes of these tensors."""
    return sum(math.prod(stored[name][0]) * stored[name][1].itemsize for name in names)


def read_whole(folder: Path, names: Iterable[str], stored: Stored) -> dict[str, Tensor]:
    """Returns these tensors of a checkpoint."""
    tensors = {name: torch.empty(stored[name][0], dtype=stored[name][1]) for name in names}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is ")  # a process alone is what this is for
        load_tensors(folder, tensors)
    return tensors
