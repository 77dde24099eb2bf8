"""Memory that checkpoints need on a machine, and whether it is there."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
from torch import Tensor, nn

from forge_core import JobError, Problem

MEMINFO = Path("/proc/meminfo")
SHARE = 0.6
"""The largest part of the available memory that checkpoints may take: training, and its data, need some, too."""


def needed(of_ranks: int, copies: int) -> int:
    """Returns the bytes that a machine needs for checkpoints, `of_ranks` of which its own ranks write at a time.

    Two checkpoints, the newest and the next, each with the copies that other machines send; and the files that are on
    their way to the durable storage.
    """
    return of_ranks * (2 * (1 + copies) + 1)


def available() -> int | None:
    """Returns the bytes that programs can still allocate on this machine; None where the system does not say."""
    match = re.search(r"MemAvailable: *(\d+) kB", MEMINFO.read_text() if MEMINFO.exists() else "")
    return 1024 * int(match[1]) if match else None


def estimated_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Returns the bytes of a checkpoint that this rank will write, before there is one.

    Ranks share out the tensors that all of them hold. Without state of the optimizer yet, two moments are assumed of
    each parameter that trains.
    """
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    tensors: list[Tensor] = list(model.state_dict().values())
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = [value for value in optimizer.state.get(parameter, {}).values() if isinstance(value, Tensor)]
            tensors += state or 2 * [parameter]
    # Sharded tensors count whole, too. A pipeline's ranks have other tensors each, which makes this too small: when the
    # first checkpoint is written, the true size is looked at
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) // world


def check_room(of_ranks: int, copies: int, held: int = 0) -> None:
    """Raise a `JobError` if checkpoints, of which this machine's ranks write `of_ranks` bytes, need too much memory.

    Args:
        of_ranks: bytes of one checkpoint that the ranks of this machine write.
        copies: other machines that send theirs.
        held: bytes that checkpoints take already.
    """
    free = available()
    if free is None or needed(of_ranks, copies) <= SHARE * (free + held):
        return
    text = (
        f"checkpoints in memory need {needed(of_ranks, copies) / 1e9:,.2f} GB on this machine, more than "
        f"{SHARE:.0%} of the {(free + held) / 1e9:,.2f} GB that are available; use more machines, fewer copies, or "
        "another storage"
    )
    raise JobError([Problem("checkpoint.storage.copies", text)])


def local_ranks() -> int:
    """Returns the number of ranks on this machine, as set by their launcher."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
