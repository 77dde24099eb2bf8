"""Tensors on disk: files of raw bytes.

A file holds the bytes of chunks of tensors, row by row, one chunk after the other, and nothing that could be executed.
SHA-256 is taken of the bytes on their way to the file.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from attrs import frozen
from torch import Tensor

from forge_core.checkpoint.index import Chunk, Extent, Place
from forge_core.checkpoint.manifest import threads
from forge_core.checkpoint.ranks import describe_fault
from forge_core.contracts.errors import CheckpointError
from forge_core.launch.progress_beacon import report_progress

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import WriteItem

SMALLEST_SHARE = 1 << 25
"""Bytes below which another file, and a thread to write it, does not pay."""
FLUSHED_TOGETHER = 1 << 24
"""Bytes that start on their way to the disk at a time."""

Share = Sequence["WriteItem"]
"""The chunks of one file, in order."""
Files = dict[str, dict[str, Any]]
"""Name -> size and SHA-256, as the manifest has them."""


# --- writing -----------------------------------------------------------------------------------------------------


def divide(items: Sequence[WriteItem], rank: int) -> dict[str, Share]:
    """The chunks that a rank writes, by the files that it writes them to, which are of about the same size."""
    count = max(1, min(threads(), sum(map(_size, items)) // SMALLEST_SHARE))
    shares: list[list[WriteItem]] = [[] for _ in range(count)]
    filled = [0] * count
    for item in sorted(items, key=_size, reverse=True):
        smallest = filled.index(min(filled))
        shares[smallest].append(item)
        filled[smallest] += _size(item)
    return {f"__{rank}_{number}.distcp": share for number, share in enumerate(shares)}


def extents(shares: Mapping[str, Share]) -> dict[Place, Extent]:
    """Where each chunk will lie."""
    places = {}
    for name, share in shares.items():
        start = 0
        for item in share:
            places[item.index.fqn, tuple(item.index.offset or ())] = Extent(name, start)
            start += _size(item)
    return places


def write_shards(folder: Path, shares: Mapping[str, Share], tensor_of: Callable[[str], Tensor]) -> Files:
    """Write and flush the files of a rank, several at a time.

    Args:
        tensor_of: this rank's part of the tensor of a name.

    Raises:
        CheckpointError: a file cannot be written; names it.
    """

    def write(name: str) -> Files:
        with new_file(folder / name) as file:
            for item in shares[name]:
                file.write(_bytes_of(tensor_of(item.index.fqn)))
        return {name: file.entry}

    with ThreadPoolExecutor(len(shares)) as pool:
        return {name: entry for written in pool.map(write, shares) for name, entry in written.items()}


class HashedFile:
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
        """Have the kernel begin to write to the disk now, so that at the end there is little left to wait for. It does
        so when told that the pages are not needed, and keeps them until they are on the disk."""
        self._file.flush()
        if hasattr(os, "posix_fadvise"):
            started, self._on_its_way = self._on_its_way, self.size
            os.posix_fadvise(self._file.fileno(), started, self.size - started, os.POSIX_FADV_DONTNEED)

    @property
    def entry(self) -> dict[str, Any]:
        """The file's entry in the manifest."""
        return {"size": self.size, "sha256": self._digest.hexdigest()}


@contextmanager
def new_file(path: Path) -> Iterator[HashedFile]:
    """A file that is on the disk when the context ends.

    Raises:
        CheckpointError: it cannot be written; names it.
    """
    try:
        with path.open("wb") as file:
            yield HashedFile(file)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {describe_fault(error)}") from error


def _size(item: WriteItem) -> int:
    """Bytes of a chunk to be written."""
    data = item.tensor_data
    if data is None:
        raise CheckpointError(f"{item.index.fqn} is not a tensor")
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def _bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's own memory where it is contiguous and on the host, else a copy."""
    array: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


# --- reading -----------------------------------------------------------------------------------------------------


@frozen(eq=False)
class Read:
    """The overlap of a stored chunk with this rank's part of a tensor."""

    name: str
    chunk: Chunk
    dtype: torch.dtype
    """As stored."""
    offsets: tuple[int, ...]
    """Where the overlap begins in the chunk."""
    target: Tensor
    """A view of the memory to fill, of the overlap's shape."""


def overlap(name: str, chunk: Chunk, dtype: torch.dtype, local: Tensor, offsets: Sequence[int]) -> Read | None:
    """The read of `chunk` into `local`, the tensor's part at `offsets`; None if they have nothing in common."""
    within = []
    for dimension, (first, length) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
        start = max(first, offsets[dimension])
        count = min(first + length, offsets[dimension] + local.shape[dimension]) - start
        if count <= 0:
            return None
        local = local.narrow(dimension, start - offsets[dimension], count)
        offsets = [*offsets[:dimension], start, *offsets[dimension + 1 :]]
        within.append(start - first)
    return Read(name, chunk, dtype, tuple(within), local)


def read_shards(folder: Path, reads: Iterable[Read]) -> None:
    """Fill the targets: of each chunk only the part that is needed, where its rows lie together.

    Raises:
        CheckpointError: a file ends too early.
        OSError: a file cannot be read.
    """
    by_file: dict[str, list[Read]] = {}
    for read in reads:
        by_file.setdefault(read.chunk.extent.file, []).append(read)
    for name, parts in by_file.items():
        with (folder / name).open("rb") as file:
            for read in sorted(parts, key=lambda read: read.chunk.extent.start):
                _read(file, read)
                report_progress("reading")


def _read(file: BinaryIO, read: Read) -> None:
    target, wanted = read.target, read.target.shape
    skipped, sizes = _rows(read)
    file.seek(read.chunk.extent.start + skipped * read.dtype.itemsize)
    if target.is_cpu and target.is_contiguous() and (target.dtype, wanted) == (read.dtype, sizes):
        _fill(target, file, read.name)
        return
    data = _fill(torch.empty(sizes, dtype=read.dtype), file, read.name)
    if sizes != wanted:
        for dimension, (offset, length) in enumerate(zip(read.offsets, wanted, strict=True)):
            data = data.narrow(dimension, offset, length)
    target.copy_(data)


def _rows(read: Read) -> tuple[int, torch.Size]:
    """How many elements of the chunk to skip, and the sizes of what to read from there: the chunk from its start,
    unless whole rows are wanted."""
    sizes, wanted = torch.Size(read.chunk.sizes), read.target.shape
    if wanted[1:] != sizes[1:]:
        return 0, sizes
    return (read.offsets[0] * math.prod(sizes[1:]) if wanted else 0), wanted


def _fill(tensor: Tensor, file: BinaryIO, name: str) -> Tensor:
    """Fill a contiguous tensor on the host with the bytes that follow in a file."""
    memory = _bytes_of(tensor)
    if file.readinto(memory) != len(memory):  # type: ignore[attr-defined]
        raise CheckpointError(f"{file.name} ends before {name} does")
    return tensor
