"""Tensors on disk: files of raw bytes, written and read for torch.distributed.checkpoint.

DCP plans who writes and who reads what, whatever the sharding; what happens to a file is decided here. A file holds the
bytes of chunks of tensors, row by row, one chunk after the other, and nothing that could be executed. SHA-256 is taken
of the bytes on their way to the file.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from forge_core.checkpoint.index import INDEX, Extent, index_to_json, read_index
from forge_core.checkpoint.manifest import threads
from forge_core.checkpoint.ranks import describe_fault
from forge_core.contracts.errors import CheckpointError
from forge_core.launch.progress_beacon import report_progress

SMALLEST_SHARE = 1 << 25
"""Bytes below which another file, and a thread to write it, does not pay."""
FLUSHED_TOGETHER = 1 << 24
"""Bytes that start on their way to the disk at a time."""


class ShardWriter(StorageWriter):
    """Writes each rank's chunks into files `__{rank}_{number}.distcp`, and on rank 0 the index.

    Attributes:
        files: name -> size and SHA-256 of what this rank has written.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self.files: dict[str, dict[str, Any]] = {}

    def reset(self, checkpoint_id: Any = None) -> None: ...
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...
    def storage_meta(self) -> StorageMeta | None:
        return None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        shares = _shares(plan.items)
        names = [f"__{plan.storage_data}_{number}.distcp" for number in range(len(shares))]
        with ThreadPoolExecutor(len(shares)) as pool:
            written = list(pool.map(lambda name, share: self._write_file(name, share, planner), names, shares))
        future: Future[list[WriteResult]] = Future()
        future.set_result([result for results in written for result in results])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        extents = {result.index: result.storage_data for written in results for result in written}
        with _new_file(self._folder / INDEX) as file:
            file.write(index_to_json(metadata, extents).encode())
        self.files[INDEX] = file.entry

    def _write_file(self, name: str, items: Iterable[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        results = []
        with _new_file(self._folder / name) as file:
            for item in items:
                data, start = _bytes_of(planner.resolve_data(item)), file.size
                file.write(data)
                results.append(WriteResult(item.index, len(data), Extent(name, start)))
        self.files[name] = file.entry
        return results

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return isinstance(checkpoint_id, Path)


class ShardReader(StorageReader):
    """Reads what `ShardWriter` wrote: of each chunk only what this rank needs, where its rows lie together."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def reset(self, checkpoint_id: Any = None) -> None: ...
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return read_index(self._folder)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._tensors: Any = metadata.state_dict_metadata
        self._extents: Any = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._extents[item.storage_index].file, []).append(item)
        for name, items in by_file.items():
            with (self._folder / name).open("rb") as file:
                for item in sorted(items, key=lambda item: self._extents[item.storage_index].start):
                    self._read(file, item, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, file: BinaryIO, item: ReadItem, planner: LoadPlanner) -> None:
        entry, start = self._tensors[item.storage_index.fqn], self._extents[item.storage_index].start
        chunk, dtype = entry.chunks[item.storage_index.index], entry.properties.dtype
        target = planner.resolve_tensor(item).detach()
        skipped, sizes = _rows(item, chunk)
        file.seek(start + skipped * dtype.itemsize)
        if target.is_cpu and target.is_contiguous() and (target.dtype, target.shape) == (dtype, sizes):
            _fill(target, file, item)
        else:
            read = _fill(torch.empty(sizes, dtype=dtype), file, item)
            target.copy_(_part(read, item) if sizes == chunk.sizes else read)
        planner.commit_tensor(item, target)
        report_progress("reading")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return isinstance(checkpoint_id, Path)


class _HashedFile:
    """Takes the SHA-256 of what is written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._on_its_way = 0
        self.size = 0

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self.size += len(data)
        if self.size - self._on_its_way >= FLUSHED_TOGETHER:
            self._start_flush()
        self._digest.update(data)
        report_progress("writing")

    def _start_flush(self) -> None:
        """Have the kernel begin to write to the disk now, so that at the end there is little left to wait for. This is
        what it does when told that the pages are not needed; it keeps them until they are on the disk."""
        self._file.flush()
        if hasattr(os, "posix_fadvise"):
            started, self._on_its_way = self._on_its_way, self.size
            os.posix_fadvise(self._file.fileno(), started, self.size - started, os.POSIX_FADV_DONTNEED)

    @property
    def entry(self) -> dict[str, Any]:
        """What the manifest says of the file."""
        return {"size": self.size, "sha256": self._digest.hexdigest()}


@contextmanager
def _new_file(path: Path) -> Iterator[_HashedFile]:
    """A file that is on the disk when the context ends.

    Raises:
        CheckpointError: it could not be written; names it.
    """
    try:
        with path.open("wb") as file:
            yield _HashedFile(file)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {describe_fault(error)}") from error


def _shares(items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    """The items of one rank for several files of about the same size."""
    count = max(1, min(threads(), sum(map(_size, items)) // SMALLEST_SHARE))
    shares: list[list[WriteItem]] = [[] for _ in range(count)]
    filled = [0] * count
    for item in sorted(items, key=_size, reverse=True):
        smallest = filled.index(min(filled))
        shares[smallest].append(item)
        filled[smallest] += _size(item)
    return shares


def _size(item: WriteItem) -> int:
    """Bytes of a chunk to be written."""
    data = item.tensor_data
    if data is None:
        raise CheckpointError(f"{item.index.fqn} is not a tensor")
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def _bytes_of(tensor: Any) -> memoryview:
    """A tensor's own memory where it is contiguous and on the host, else a copy."""
    array: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _rows(item: ReadItem, chunk: ChunkStorageMetadata) -> tuple[int, torch.Size]:
    """What to read of a chunk: how many elements to skip, and the sizes from there. All of it, unless whole rows are
    wanted."""
    if item.lengths[1:] != chunk.sizes[1:]:
        return 0, chunk.sizes
    row = math.prod(chunk.sizes[1:])
    return (item.storage_offsets[0] * row if item.lengths else 0), item.lengths


def _part(read: Tensor, item: ReadItem) -> Tensor:
    """Of a whole chunk, what is wanted."""
    for dimension, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        read = read.narrow(dimension, offset, length)
    return read


def _fill(tensor: Tensor, file: BinaryIO, item: ReadItem) -> Tensor:
    """Fill a contiguous tensor on the host with the bytes that follow in a file."""
    memory = _bytes_of(tensor)
    if file.readinto(memory) != len(memory):  # type: ignore[attr-defined]
        raise CheckpointError(f"{file.name} ends before {item.storage_index.fqn} does")
    return tensor
