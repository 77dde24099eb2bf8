"""The tensors of a checkpoint, to and from its folder."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from forge_core.checkpoint.ranks import Ranks, describe_fault
from forge_core.contracts.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.api import CheckpointException

    from forge_core.checkpoint.staging import Staged


def save_tensors(
    folder: Path, tensors: Mapping[str, Tensor], staged: Staged | None, ranks: Ranks
) -> dict[str, dict[str, Any]]:
    """Write and flush tensors, sharded in any way, and their index; gives the size and SHA-256 of every file.
    Collective.

    Args:
        staged: a copy of `tensors`; its values are the ones to be written.

    Raises:
        CheckpointError: on every rank, when some rank could not write.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.state_dict_saver import save

    from forge_core.checkpoint.shards import ShardWriter
    from forge_core.checkpoint.staging import StagedPlanner

    writer, planner = ShardWriter(folder), DefaultSavePlanner()
    if staged is not None:
        staged.wait()
        planner = StagedPlanner(staged)
    elif torch.cuda.is_initialized():
        torch.cuda.synchronize()  # threads will read the tensors, each in its own stream
    try:
        with _quiet_alone():
            save(dict(tensors), storage_writer=writer, planner=planner, process_group=ranks.group)
    except CheckpointException as error:
        raise CheckpointError(_causes(error)) from error
    return {name: entry for files in ranks.gather(writer.files) for name, entry in files.items()}


def stored_tensors(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Name -> (shape, dtype) of every tensor in a checkpoint."""
    from forge_core.checkpoint.index import read_index

    entries: Mapping[str, Any] = read_index(folder).state_dict_metadata
    return {name: (entry.size, entry.properties.dtype) for name, entry in entries.items()}


def load_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill `tensors`, in place, from a checkpoint; they may be sharded in any way. Collective.

    Raises:
        CheckpointError: the checkpoint lacks one of them, has it in another shape, or cannot be read.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    from forge_core.checkpoint.shards import ShardReader

    _check_fit(folder, tensors)
    try:
        with _quiet_alone():
            load(dict(tensors), storage_reader=ShardReader(folder))
    except CheckpointException as error:
        raise CheckpointError(f"cannot read {folder}: {_causes(error)}") from error


@contextmanager
def _quiet_alone() -> Iterator[None]:
    """DCP warns of a process without a group, such as that of a command. Where there is one, a save may be in a thread,
    and the filters of warnings belong to all threads."""
    if dist.is_initialized():
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _causes(error: CheckpointException) -> str:
    return "; ".join(f"rank {rank}: {describe_fault(cause)}" for rank, (cause, _) in error.failures.items())


def _check_fit(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    stored = stored_tensors(folder)
    problems = []
    for name, tensor in tensors.items():
        if name not in stored:
            problems.append(f"{name} is missing")
        elif stored[name][0] != tensor.shape:
            problems.append(f"{name} is {list(stored[name][0])} in the checkpoint, {list(tensor.shape)} in this job")
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise CheckpointError(f"{folder} does not fit the job: {'; '.join(problems[:5])}{more}")
