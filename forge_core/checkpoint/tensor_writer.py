"""Writing the tensors of a checkpoint: who writes what, copies for a background save, and files of raw bytes.

DCP's planner decides which rank writes which chunk of a tensor; the files are ours. A file holds the bytes of chunks,
row by row, one chunk after the other, and nothing that could be executed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor

from forge_core.checkpoint.ranks import Ranks
from forge_core.checkpoint.storage import describe_fault, threads
from forge_core.checkpoint.tensors import INDEX, bytes_of
from forge_core.contracts.errors import CheckpointError
from forge_core.launch.progress_beacon import report_progress
from forge_core.parallel.mesh import local_part

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import WriteItem

SMALLEST_SHARE = 1 << 25
"""Bytes below which another file, and a thread to write it, does not pay."""
FLUSHED_TOGETHER = 1 << 24
"""Bytes that start on their way to the disk at a time."""

Share = Sequence["WriteItem"]
"""The chunks of one file, in order."""
Files = dict[str, dict[str, Any]]
"""Name -> size and SHA-256, as the manifest has them."""
Extents = dict[tuple[str, tuple[int, ...]], dict[str, Any]]
"""(name, offsets) of a chunk -> file and first byte, as the index has them."""


class Staging:
    """Host memory for one copy of this rank's part of the state, allocated at the first copy and used for all later."""

    def __init__(self) -> None:
        self.parts: dict[str, Tensor] = {}
        """The parts as they were when they were copied, once `wait` has returned."""
        self._arrived: torch.cuda.Event | None = None

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> Staging:
        """Copy this rank's part of every tensor; the copy before is overwritten.

        Copies from a device are queued behind the work that it has, and before all that is queued later: neither this
        nor the next step waits for them.
        """
        local = {name: local_part(tensor) for name, tensor in tensors.items()}
        self.parts = {name: self._room(name, part) for name, part in local.items()}
        for name, part in local.items():
            self.parts[name].copy_(part, non_blocking=True)
        if any(part.is_cuda for part in local.values()):
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        return self

    def wait(self) -> None:
        """Return once the copies from a device have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()

    def _room(self, name: str, part: Tensor) -> Tensor:
        room = self.parts.get(name)
        if room is not None and (room.shape, room.dtype) == (part.shape, part.dtype):
            return room
        return torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)  # unpinned, the copy would block


class TensorWriter:
    """Writes the tensors of a run's checkpoints."""

    # Planning merges the chunks of all ranks on rank 0, hundreds of thousands at 1,024 ranks. So the plan is kept, and
    # with it the index, while the tensors of every rank keep their names, shapes and placements. DCP's own cache of
    # plans belongs to the process, and would be shared by runs

    def __init__(self) -> None:
        self._local: Sequence[WriteItem] | None = None
        self._shares: Mapping[str, Share] = {}
        self._index = ""

    def write(self, folder: Path, tensors: Mapping[str, Tensor], staged: Staging | None, ranks: Ranks) -> Files:
        """Write and flush tensors, sharded in any way, and their index. Collective.

        With `staged`, a copy of `tensors`, its values are the ones to write. Raises on every rank if one cannot write.

        Returns:
            Size and SHA-256 of every file of all ranks, by name, on rank 0.
        """
        # A rank whose own tensors stayed must plan as well if those of another changed: planning is collective
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
        # Not DCP's own driver, which sends the metadata of all chunks to all ranks: a rank needs its items only
        mine = ranks.scatter([plan.items for plan in merged[0][0]] if merged else [])
        self._shares = _divide(mine, ranks.rank)
        extents = ranks.on_all(lambda: _extents(self._shares))
        if merged:
            self._index = _index_json(merged[0][1], {place: at for part in extents for place, at in part.items()})
        self._local = local  # last: a plan that failed halfway is made again

    def _write(self, folder: Path, parts: Mapping[str, Tensor], with_index: bool) -> Files:
        """Write and flush the files of this rank, several at a time, since hashing keeps a core busy."""

        def write(name: str) -> dict[str, Any]:
            with new_file(folder / name) as file:
                for item in self._shares[name]:
                    file.write(bytes_of(local_part(parts[item.index.fqn])))
            return file.entry

        # Not DCP's writer: an exception in one of its extra threads ends that thread, and the save reports success
        with ThreadPoolExecutor(len(self._shares)) as pool:
            files = dict(zip(self._shares, pool.map(write, self._shares), strict=True))
        if with_index:
            with new_file(folder / INDEX) as file:
                file.write(self._index.encode())
            files[INDEX] = file.entry
        return files


# --- planning ----------------------------------------------------------------------------------------------------


def _chunks_of(tensors: Mapping[str, Tensor], ranks: Ranks) -> Sequence[WriteItem]:
    from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{name} is not a tensor")
    return create_default_local_save_plan(dict(tensors), ranks.rank == 0).items


def _divide(items: Sequence[WriteItem], rank: int) -> dict[str, Share]:
    """The chunks that a rank writes, by the files that it writes them to, which are of about the same size."""
    count = max(1, min(threads(), sum(map(_size, items)) // SMALLEST_SHARE))
    shares: list[list[WriteItem]] = [[] for _ in range(count)]
    filled = [0] * count
    for item in sorted(items, key=_size, reverse=True):
        smallest = filled.index(min(filled))
        shares[smallest].append(item)
        filled[smallest] += _size(item)
    return {f"__{rank}_{number}.distcp": share for number, share in enumerate(shares)}


def _extents(shares: Mapping[str, Share]) -> Extents:
    extents = {}
    for name, share in shares.items():
        start = 0
        for item in share:
            extents[item.index.fqn, tuple(item.index.offset or ())] = {"file": name, "start": start}
            start += _size(item)
    return extents


def _index_json(metadata: Metadata, extents: Extents) -> str:
    """The index of a checkpoint that is planned; `metadata` has the chunks of all ranks."""
    index: dict[str, Any] = {}
    tensors: Mapping[str, Any] = metadata.state_dict_metadata
    for name, tensor in tensors.items():
        chunks = [
            {"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), **extents[name, tuple(chunk.offsets)]}
            for chunk in tensor.chunks
        ]
        dtype = str(tensor.properties.dtype).removeprefix("torch.")
        index[name] = {"dtype": dtype, "size": list(tensor.size), "chunks": chunks}
    return json.dumps(index)


def _size(item: WriteItem) -> int:
    """Bytes of a chunk to be written."""
    assert item.tensor_data is not None
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


# --- files -------------------------------------------------------------------------------------------------------


class HashedFile:
    """Takes the SHA-256 of the bytes on their way to a file."""

    # On their way, and not by reading the file back: that is no quicker, and needs its pages to be in memory still

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._flushing = 0
        """Bytes that the kernel has begun to write to the disk."""
        self.size = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        self._file.write(data)
        self.size += len(data)
        if self.size - self._flushing >= FLUSHED_TOGETHER:
            self._start_flush()  # before hashing, so that the disk works while this thread hashes
        self._digest.update(data)
        report_progress("writing")

    def _start_flush(self) -> None:
        """Let the kernel begin to write to the disk, so that at the end there is little left to wait for."""
        self._file.flush()
        if hasattr(os, "posix_fadvise"):
            # Pages that are not needed are written at once, and kept until they are on the disk. `fdatasync` would wait
            started, self._flushing = self._flushing, self.size
            os.posix_fadvise(self._file.fileno(), started, self.size - started, os.POSIX_FADV_DONTNEED)

    @property
    def entry(self) -> dict[str, Any]:
        """The file's entry in the manifest."""
        return {"size": self.size, "sha256": self._digest.hexdigest()}


@contextmanager
def new_file(path: Path) -> Iterator[HashedFile]:
    """A file that is on the disk when the context ends; raises a `CheckpointError` with its name otherwise."""
    try:
        with path.open("wb") as file:
            yield HashedFile(file)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {describe_fault(error)}") from error
