"""The tensors of a checkpoint, to and from its folder, whatever their sharding.

DCP's planner decides which rank writes which chunk; the files are ours (`shards`, `index`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen
from torch import Tensor
from torch.distributed.tensor import DTensor

from forge_core.checkpoint.index import INDEX, Index, index_to_json, read_index
from forge_core.checkpoint.ranks import Ranks
from forge_core.checkpoint.shards import (
    Files,
    Read,
    Share,
    divide,
    extents,
    new_file,
    overlap,
    read_shards,
    write_shards,
)
from forge_core.contracts.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import WriteItem


@frozen
class Staged:
    """This rank's part of every tensor, as it was when it was copied."""

    parts: Mapping[str, Tensor]
    wait: Callable[[], object]
    """Returns when the copies have arrived."""


class Staging:
    """Host memory for one copy of the state. It is allocated at the first copy and used again for all later ones."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> Staged:
        """Copy this rank's part of every tensor; the copy before is overwritten.

        Copies from a device are queued behind the work that it has, and before all that is queued later: neither this
        nor the next step waits for them.
        """
        local = {name: _local(tensor) for name, tensor in tensors.items()}
        self._memory = {name: self._room(name, part) for name, part in local.items()}
        for name, part in local.items():
            self._memory[name].copy_(part, non_blocking=True)
        return Staged(self._memory, _arrival(local))

    def _room(self, name: str, part: Tensor) -> Tensor:
        room = self._memory.get(name)
        if room is not None and (room.shape, room.dtype) == (part.shape, part.dtype):
            return room
        return torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)


class TensorWriter:
    """Writes the tensors of a run's checkpoints.

    Planning merges the chunks of all ranks on rank 0, hundreds of thousands at 1,024 ranks. So the plan is kept, and
    with it the index, while the tensors of every rank keep their names, shapes and placements.
    """

    def __init__(self) -> None:
        self._local: Sequence[WriteItem] | None = None
        self._shares: Mapping[str, Share] = {}
        self._index = ""

    def write(self, folder: Path, tensors: Mapping[str, Tensor], staged: Staged | None, ranks: Ranks) -> Files:
        """Write and flush tensors, sharded in any way, and their index. Collective.

        Args:
            staged: a copy of `tensors`; its values are the ones to be written.

        Returns:
            Size and SHA-256 of every file of all ranks, by name, on rank 0.

        Raises:
            CheckpointError: on every rank, when some rank could not write.
        """
        changed = ranks.on_all(lambda: _chunks_of(tensors, ranks) != self._local)
        if ranks.on_rank0(lambda: any(changed)):
            self._plan(_chunks_of(tensors, ranks), ranks)
        if staged is not None:
            staged.wait()
        elif torch.cuda.is_initialized():
            torch.cuda.synchronize()  # threads will read the tensors, each in its own stream
        parts = staged.parts if staged is not None else tensors
        written = ranks.on_all(lambda: self._write(folder, parts, ranks.rank == 0))
        return {name: entry for files in written for name, entry in files.items()}

    def _plan(self, local: Sequence[WriteItem], ranks: Ranks) -> None:
        """Divide the chunks of all ranks among them: each once, replicated ones on any rank. Collective."""
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
        from torch.distributed.checkpoint.planner import SavePlan

        plans = ranks.on_all(lambda: SavePlan(list(local)))
        merged: list[Any] = []
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        ranks.on_rank0(lambda: merged.append(planner.create_global_plan(plans)))
        mine = ranks.scatter([plan.items for plan in merged[0][0]] if merged else [])
        self._shares = divide(mine, ranks.rank)
        places = ranks.on_all(lambda: extents(self._shares))
        if merged:
            self._index = index_to_json(merged[0][1], {index: at for part in places for index, at in part.items()})
        self._local = local  # last: a plan that failed halfway is made again

    def _write(self, folder: Path, parts: Mapping[str, Tensor], with_index: bool) -> Files:
        files = write_shards(folder, self._shares, lambda name: _local(parts[name]))
        if with_index:
            with new_file(folder / INDEX) as file:
                file.write(self._index.encode())
            files[INDEX] = file.entry
        return files


def shared_index(folder: Path) -> Index:
    """The index of a checkpoint, which rank 0 reads for all. Collective.

    Raises:
        CheckpointError: it is missing, or not of the form that is written here.
    """
    return Ranks().on_rank0(lambda: read_index(folder))


def stored_tensors(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Name -> (shape, dtype) of every tensor in a checkpoint, read by this process.

    Raises:
        CheckpointError: the index is missing, or not of the form that is written here.
    """
    return read_index(folder).shapes


def load_tensors(folder: Path, tensors: Mapping[str, Tensor], index: Index | None = None) -> None:
    """Fill `tensors`, in place, from a checkpoint; they may be sharded in any way. Collective.

    Args:
        index: of this checkpoint, from `shared_index`; by default it is read.

    Raises:
        CheckpointError: the checkpoint lacks one of them, has it in another shape, or cannot be read.
    """
    stored = index or shared_index(folder)
    _check_fit(folder, tensors, stored.shapes)
    try:
        Ranks().on_all(lambda: read_shards(folder, _reads(tensors, stored)))
    except CheckpointError as error:
        raise CheckpointError(f"cannot read {folder}: {error}") from error


def _chunks_of(tensors: Mapping[str, Tensor], ranks: Ranks) -> Sequence[WriteItem]:
    from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{name} is not a tensor")
    return create_default_local_save_plan(dict(tensors), ranks.rank == 0).items


def _reads(tensors: Mapping[str, Tensor], index: Index) -> Iterator[Read]:
    """The parts of chunks that this rank needs, whichever rank wrote them."""
    from torch.distributed.checkpoint.planner_helpers import _create_chunk_list

    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
            continue  # of other ranks
        [part], dtype = _create_chunk_list(tensor), index.tensors[name].dtype
        for chunk in index.chunks(name, part.offsets, part.sizes):
            if read := overlap(name, chunk, dtype, _local(tensor).detach(), part.offsets):
                yield read


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _arrival(tensors: Mapping[str, Tensor]) -> Callable[[], object]:
    if not any(tensor.is_cuda for tensor in tensors.values()):
        return lambda: None
    event = torch.cuda.Event()
    event.record()
    return event.synchronize


def _check_fit(folder: Path, tensors: Mapping[str, Tensor], stored: Mapping[str, tuple[torch.Size, Any]]) -> None:
    problems = []
    for name, tensor in tensors.items():
        if name not in stored:
            problems.append(f"{name} is missing")
        elif stored[name][0] != tensor.shape:
            problems.append(f"{name} is {list(stored[name][0])} in the checkpoint, {list(tensor.shape)} in this job")
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise CheckpointError(f"{folder} does not fit the job: {'; '.join(problems[:5])}{more}")
