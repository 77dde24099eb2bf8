"""The tensors of a checkpoint: their index, and reading them into any sharding.

DCP (torch.distributed.checkpoint) keeps its metadata as a pickle, which runs code when it is loaded. Here it is
`index.json`, checked when it is read: name -> dtype, size and chunks, and for each chunk its offsets and sizes in the
tensor, its file, and where in the file its bytes start.

C: chunks of a tensor, D: its dimensions.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from attrs import frozen
from torch import Tensor
from torch.distributed.tensor import DTensor

from forge_core.checkpoint.ranks import Ranks
from forge_core.checkpoint.storage import MALFORMED, describe_fault, own_file
from forge_core.contracts.errors import CheckpointError
from forge_core.launch.progress_beacon import report_progress
from forge_core.parallel.mesh import local_part

INDEX = "index.json"

Shapes = Mapping[str, tuple[torch.Size, torch.dtype]]
"""Name -> (shape, dtype)."""


@frozen(eq=False)
class Read:
    """The overlap of a stored chunk with this rank's part of a tensor."""

    name: str
    file: str
    start: int
    """First byte of the chunk in the file."""
    dtype: torch.dtype
    """As stored."""
    sizes: torch.Size
    """Sizes of the chunk."""
    offsets: Sequence[int]
    """Start of the overlap in the chunk."""
    target: Tensor
    """View of the memory to fill, of the overlap's shape."""


@frozen(eq=False)
class StoredTensor:
    """A tensor of a checkpoint."""

    # Arrays, since each rank that saved has a chunk of each tensor: at 1,024 ranks an object for every one takes
    # seconds and hundreds of megabytes
    dtype: torch.dtype
    size: torch.Size
    offsets: np.ndarray
    """(C, D)"""
    sizes: np.ndarray
    """(C, D)"""
    files: np.ndarray
    """(C,) numbers of names in `Index.files`."""
    starts: np.ndarray
    """(C,) bytes."""


@frozen(eq=False)
class Index:
    """The tensors of a checkpoint by name."""

    files: Sequence[str]
    tensors: Mapping[str, StoredTensor]

    @property
    def shapes(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Name -> (shape, dtype)."""
        return {name: (stored.size, stored.dtype) for name, stored in self.tensors.items()}

    def reads(self, name: str, local: Tensor, offsets: Sequence[int]) -> Iterator[Read]:
        """The reads that fill `local`, the part of a tensor at `offsets`: one for each chunk that overlaps it."""
        stored, first = self.tensors[name], np.asarray(offsets, dtype=np.int64)
        starts = np.maximum(stored.offsets, first)
        ends = np.minimum(stored.offsets + stored.sizes, first + np.asarray(local.shape, dtype=np.int64))
        for chunk in np.flatnonzero((starts < ends).all(axis=1)):
            inside = map(slice, (starts[chunk] - first).tolist(), (ends[chunk] - first).tolist())
            yield Read(
                name,
                self.files[stored.files[chunk]],
                int(stored.starts[chunk]),
                stored.dtype,
                torch.Size(stored.sizes[chunk].tolist()),
                (starts[chunk] - stored.offsets[chunk]).tolist(),
                local[tuple(inside)],
            )


# --- the index ---------------------------------------------------------------------------------------------------


def shared_index(folder: Path) -> Index:
    """The index of a checkpoint, which rank 0 reads for all; raises as `stored_tensors`. Collective."""
    # 1,024 ranks x 600 tensors are 53 MB of JSON, 2 to 7 s of parsing; its arrays are broadcast in a fraction of that
    return Ranks().on_rank0(lambda: _read_index(folder))


def stored_tensors(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Name -> (shape, dtype) of every tensor in a checkpoint, read by this process.

    Raises:
        CheckpointError: the index is missing, or not of the form that is written here.
    """
    return _read_index(folder).shapes


def _read_index(folder: Path) -> Index:
    path = folder / INDEX
    try:
        status = path.stat()
        return _read_version(path, (status.st_mtime_ns, status.st_size, status.st_ino))
    except MALFORMED as error:
        raise CheckpointError(f"{path}: {describe_fault(error)}") from error


@functools.lru_cache(maxsize=1)  # programs that list the tensors and then load them one at a time parse it once
def _read_version(path: Path, _version: tuple[int, ...]) -> Index:
    return parse_index(path.read_text())


def parse_index(text: str) -> Index:
    """Raises one of `MALFORMED` if the text is no index."""
    numbers: dict[str, int] = {}
    tensors = {name: _parse_tensor(name, entry, numbers) for name, entry in json.loads(text).items()}
    return Index(list(numbers), tensors)


def _parse_tensor(name: str, entry: Mapping[str, Any], numbers: dict[str, int]) -> StoredTensor:
    """One tensor; numbers the files that are new."""
    dtype, size, chunks = getattr(torch, entry["dtype"]), torch.Size(entry["size"]), entry["chunks"]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"not a dtype: {entry['dtype']!r}")
    files = [numbers.setdefault(own_file(chunk["file"]), len(numbers)) for chunk in chunks]
    stored = StoredTensor(
        dtype=dtype,
        size=size,
        offsets=np.array([chunk["offsets"] for chunk in chunks], dtype=np.int64).reshape(len(chunks), len(size)),
        sizes=np.array([chunk["sizes"] for chunk in chunks], dtype=np.int64).reshape(len(chunks), len(size)),
        files=np.array(files, dtype=np.int64),
        starts=np.array([chunk["start"] for chunk in chunks], dtype=np.int64),
    )
    # Chunks as they are written never overlap, so a gap shows in the sum; it would leave memory unfilled in silence
    if int(stored.sizes.prod(axis=1).sum()) != math.prod(size):
        raise ValueError(f"the chunks of {name} are not the whole of it")
    return stored


# --- loading -----------------------------------------------------------------------------------------------------


def load_tensors(folder: Path, tensors: Mapping[str, Tensor], index: Index | None = None) -> None:
    """Fill `tensors`, in place, from a checkpoint; they may be sharded in any way. Collective.

    The checkpoint's `shared_index` is read unless it is given.

    Raises:
        CheckpointError: the checkpoint lacks one of them, has it in another shape, or cannot be read.
    """
    stored = index or shared_index(folder)
    _check_fit(folder, tensors, stored.shapes)
    try:
        Ranks().on_all(lambda: _read_files(folder, _reads(tensors, stored)))
    except CheckpointError as error:
        raise CheckpointError(f"cannot read {folder}: {error}") from error


def _check_fit(folder: Path, tensors: Mapping[str, Tensor], stored: Shapes) -> None:
    problems = []
    for name, tensor in tensors.items():
        if name not in stored:
            problems.append(f"{name} is missing")
        elif stored[name][0] != tensor.shape:
            problems.append(f"{name} is {list(stored[name][0])} in the checkpoint, {list(tensor.shape)} in this job")
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise CheckpointError(f"{folder} does not fit the job: {'; '.join(problems[:5])}{more}")


def _reads(tensors: Mapping[str, Tensor], index: Index) -> Iterator[Read]:
    """The parts of chunks that this rank needs, whichever rank wrote them."""
    from torch.distributed.checkpoint.planner_helpers import _create_chunk_list

    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
            continue  # belongs to other ranks
        [part] = _create_chunk_list(tensor)
        yield from index.reads(name, local_part(tensor).detach(), part.offsets)


def _read_files(folder: Path, reads: Iterable[Read]) -> None:
    """Fill the targets of all reads, each file from its start to its end, as disks read fastest."""
    in_order = sorted(reads, key=lambda read: (read.file, read.start))
    for name, of_file in itertools.groupby(in_order, key=lambda read: read.file):
        with (folder / name).open("rb") as file:
            for read in of_file:
                _read(file, read)
                report_progress("reading")


def _read(file: BinaryIO, read: Read) -> None:
    target, sizes, skipped = read.target, read.sizes, 0
    # Rows lie one after the other: where whole ones are wanted, as after a sharding by rows, no others are read
    if target.ndim and target.shape[1:] == sizes[1:]:
        skipped, sizes = read.offsets[0] * math.prod(sizes[1:]), target.shape
    file.seek(read.start + skipped * read.dtype.itemsize)
    fits = target.is_cpu and target.is_contiguous() and (target.dtype, target.shape) == (read.dtype, sizes)
    data = target if fits else torch.empty(sizes, dtype=read.dtype)
    memory = bytes_of(data)
    if file.readinto(memory) != len(memory):  # type: ignore[attr-defined]
        raise CheckpointError(f"{file.name} ends before {read.name} does")
    if sizes != target.shape:
        ends = map(operator.add, read.offsets, target.shape)
        data = data[tuple(map(slice, read.offsets, ends))]
    if not fits:
        target.copy_(data)


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's own memory where it is contiguous and on the host, else a copy."""
    array: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
