"""The tensors of a checkpoint: their index, reading them into any sharding, and writing them from any.

DCP (torch.distributed.checkpoint) keeps its metadata as a pickle, which runs code when it is loaded. Here it is
`index.json`, checked when it is read: name -> dtype, size and chunks, and for each chunk its offsets and sizes in the
tensor, its file, and where in the file its bytes start. A file holds the bytes of chunks, row by row, one after the
other. Only the planner is DCP's, which decides which rank writes which chunk.

C: chunks of a tensor, D: its dimensions.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.tensor import DTensor

from forge_core.checkpoint.ranks import Ranks
from forge_core.checkpoint.storage import (
    MALFORMED,
    MANIFEST,
    describe_fault,
    fetch,
    manifest_digest,
    own_file,
    read_manifest,
    threads,
    write_file,
)
from forge_core.contracts.errors import CheckpointError
from forge_core.devices import home_of
from forge_core.launch.progress_beacon import report_progress
from forge_core.parallel.mesh import local_part

INDEX = "index.json"
SMALLEST_SHARE = 1 << 25
"""Bytes below which another file, and a thread to write it, does not pay."""

Extents = dict[tuple[str, tuple[int, ...]], dict[str, Any]]
"""(name, offsets) of a chunk -> file and first byte, as the index has them."""

Shapes = Mapping[str, tuple[torch.Size, torch.dtype]]
"""Name -> (shape, dtype)."""
Tensors = Mapping[str, Tensor]
"""Name -> tensor."""
Plan = Sequence[WriteItem]
"""Chunks to write, as DCP plans them."""


@frozen(eq=False)
class Read:
    """The overlap of a stored chunk with this rank's part of a tensor.

    `start` is the chunk's first byte in the file, `dtype` and `sizes` are the chunk's, `offsets` the overlap's in it.
    """

    name: str
    file: str
    start: int
    dtype: torch.dtype
    sizes: torch.Size
    offsets: Sequence[int]
    target: Tensor
    """View of the memory to fill, of the overlap's shape."""


@frozen(eq=False)
class StoredTensor:
    """A tensor of a checkpoint."""

    # Arrays: at 1,024 ranks, an object for each rank's chunk of each tensor takes seconds and hundreds of megabytes.
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
    """Names of files in its folder, and whole paths of those of its base."""
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
    """The index of a checkpoint, which rank 0 reads for all; raises as `read_index`. Collective."""
    # 1,024 ranks x 600 tensors are 53 MB of JSON, 2 to 7 s of parsing; its arrays are broadcast in a fraction of that
    return Ranks().on_rank0(lambda: read_index(folder))


def read_index(folder: Path) -> Index:
    """The index, with the tensors that the checkpoint leaves to its base; read by this process.

    Raises a `CheckpointError` if it is missing or not of the form written here, or if the base is another one now.
    """
    path = folder / INDEX
    try:
        fetch(folder, [INDEX])
        status = path.stat()
        index = _read_version(path, (status.st_mtime_ns, status.st_size, status.st_ino))
    except MALFORMED as error:
        raise CheckpointError(f"{path}: {describe_fault(error)}") from error
    base = read_manifest(folder).get("base")
    return index if base is None else _with_base(folder, index, base)


def base_folder(folder: Path, base: Mapping[str, Any]) -> Path:
    """The folder of a checkpoint's base; raises a `CheckpointError` if it is gone, or another checkpoint."""
    place = Path(base["path"])
    there = (place / MANIFEST).is_file()
    if not there or manifest_digest(place) != base["digest"]:
        what = "is another checkpoint now" if there else "is not there"
        hint = "put it back, or leave a link to it there"
        raise CheckpointError(f"{folder} holds only what was trained; its base {place}, with all else, {what}: {hint}")
    return place


def _with_base(folder: Path, index: Index, base: Mapping[str, Any]) -> Index:
    below = read_index(place := base_folder(folder, base))
    borrowed = {name: below.tensors[theirs] for name, theirs in base["tensors"].items()}
    shifted = {name: evolve(each, files=each.files + len(index.files)) for name, each in borrowed.items()}
    return Index([*index.files, *(str(place / file) for file in below.files)], {**shifted, **index.tensors})


@functools.lru_cache(maxsize=2)  # programs that list the tensors and then load them one at a time parse it once
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
    keys = "offsets", "sizes", "start"
    offsets, sizes, starts = (np.array([chunk[key] for chunk in chunks], dtype=np.int64) for key in keys)
    shape = len(chunks), len(size)
    stored = StoredTensor(
        dtype=dtype,
        size=size,
        offsets=offsets.reshape(shape),
        sizes=sizes.reshape(shape),
        files=np.array(files, dtype=np.int64),
        starts=starts,
    )
    # Chunks as they are written never overlap, so a gap shows in the sum; it would leave memory unfilled in silence
    if int(stored.sizes.prod(axis=1).sum()) != math.prod(size):
        raise ValueError(f"the chunks of {name} are not the whole of it")
    return stored


# --- loading -----------------------------------------------------------------------------------------------------


def load_tensors(folder: Path, tensors: Tensors, index: Index | None = None) -> None:
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


def _check_fit(folder: Path, tensors: Tensors, stored: Shapes) -> None:
    problems = []
    for name, tensor in tensors.items():
        if name not in stored:
            problems.append(f"{name} is missing")
        elif stored[name][0] != tensor.shape:
            problems.append(f"{name} is {list(stored[name][0])} in the checkpoint, {list(tensor.shape)} in this job")
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise CheckpointError(f"{folder} does not fit the job: {'; '.join(problems[:5])}{more}")


def _reads(tensors: Tensors, index: Index) -> Iterator[Read]:
    """The parts of chunks that this rank needs, whichever rank wrote them."""
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
            continue  # belongs to other ranks
        [part] = _create_chunk_list(tensor)
        yield from index.reads(name, local_part(tensor).detach(), part.offsets)


def _read_files(folder: Path, reads: Iterable[Read]) -> None:
    """Fill the targets of all reads, each file from its start to its end, as disks read fastest."""
    in_order, done = sorted(reads, key=lambda read: (read.file, read.start)), itertools.count(1)
    for place, of_place in itertools.groupby(
        dict.fromkeys(folder / read.file for read in in_order), lambda f: f.parent
    ):
        fetch(place, [file.name for file in of_place])
    for name, of_file in itertools.groupby(in_order, key=lambda read: read.file):
        with (folder / name).open("rb") as file:
            for read in of_file:
                _read(file, read)
                report_progress("reading tensors", next(done), len(in_order))


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
        data = data[tuple(map(slice, read.offsets, map(operator.add, read.offsets, target.shape)))]
    if not fits:
        target.copy_(data)


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's own memory where it is contiguous and on the host, else a copy."""
    array: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


# --- saving ------------------------------------------------------------------------------------------------------


class Staging:
    """Host memory for one copy of this rank's part of the state, allocated at the first copy and used for all later."""

    def __init__(self) -> None:
        self.parts: dict[str, Tensor] = {}
        """The parts as they were when they were copied, once `wait` has returned."""
        self._arrived: Any
        """The event behind the last copy; on the CPU, it has always occurred."""

    @torch.no_grad()
    def copy(self, tensors: Tensors) -> Staging:
        """Copy this rank's part of every tensor; the copy before is overwritten.

        Copies from a device are queued behind the work that it has, and before all that is queued later: neither this
        nor the next step waits for them.
        """
        local = {name: local_part(tensor) for name, tensor in tensors.items()}
        self.parts = {name: self._room(name, part) for name, part in local.items()}
        for name, part in local.items():
            self.parts[name].copy_(part, non_blocking=True)
        self._arrived = torch.get_device_module(home_of(local.values())).Event()
        self._arrived.record()
        return self

    def wait(self) -> None:
        """Return once the copies from a device have arrived."""
        self._arrived.synchronize()

    def _room(self, name: str, part: Tensor) -> Tensor:
        room = self.parts.get(name)
        if room is not None and (room.shape, room.dtype) == (part.shape, part.dtype):
            return room
        return torch.empty(part.shape, dtype=part.dtype, pin_memory=not part.is_cpu)  # unpinned, the copy would block


class TensorWriter:
    """Writes the tensors of a run's checkpoints."""

    # Planning merges the chunks of all ranks on rank 0, hundreds of thousands at 1,024 ranks. So the plan is kept, and
    # with it the index, while the tensors of every rank keep their names, shapes and placements. DCP's own cache of
    # plans belongs to the process, and would be shared by runs

    def __init__(self) -> None:
        self._local: Plan | None = None
        self._shares: Mapping[str, Plan] = {}
        self._index = ""

    def write(self, folder: Path, tensors: Tensors, staged: Staging | None, ranks: Ranks) -> dict[str, Any]:
        """Write and flush tensors, sharded in any way, and their index; returns the manifest's `files` on rank 0.

        Collective. With `staged`, a copy of `tensors`, its values are written. Raises on all ranks if one cannot write.
        """
        # A rank whose own tensors are unchanged must also plan if another rank's have changed: planning is collective
        changed = ranks.on_all(lambda: _chunks_of(tensors, ranks) != self._local)
        if ranks.on_rank0(lambda: any(changed)):
            self._plan(_chunks_of(tensors, ranks), ranks)
        if staged is not None:
            staged.wait()
        else:
            torch.get_device_module(
                home_of(tensors.values())
            ).synchronize()  # threads will read the tensors, each in its own stream
        parts = staged.parts if staged is not None else tensors
        written = ranks.on_all(lambda: self._write(folder, parts, ranks.rank == 0))
        return {name: entry for files in written for name, entry in files.items()}

    def _plan(self, local: Plan, ranks: Ranks) -> None:
        """Divide the chunks of all ranks among them: each once, replicated ones on any rank. Collective."""
        plans = ranks.on_all(lambda: SavePlan(list(local)))
        merged: list[Any] = []
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        ranks.on_rank0(lambda: merged.append(planner.create_global_plan(plans)))
        # Not DCP's own driver, which sends the metadata of all chunks to all ranks: a rank needs its items only
        self._shares = _divide(ranks.scatter([plan.items for plan in merged[0][0]] if merged else []), ranks.rank)
        extents = ranks.on_all(lambda: _extents(self._shares))
        if merged:
            self._index = _index_json(merged[0][1], {place: at for part in extents for place, at in part.items()})
        self._local = local  # last: a plan that failed halfway is made again

    def _write(self, folder: Path, parts: Tensors, with_index: bool) -> dict[str, Any]:
        """Write and flush the files of this rank, several at a time, since hashing keeps a core busy."""

        def write(name: str) -> dict[str, Any]:
            return write_file(folder / name, (bytes_of(local_part(parts[i.index.fqn])) for i in self._shares[name]))

        # Not DCP's writer: an exception in one of its extra threads ends that thread, and the save reports success
        with ThreadPoolExecutor(len(self._shares)) as pool:
            files = dict(zip(self._shares, pool.map(write, self._shares), strict=True))
        if with_index:
            files[INDEX] = write_file(folder / INDEX, [self._index.encode()])
        return files


# --- dividing the tensors among the ranks ---------------------------------------------------------------------------


def _chunks_of(tensors: Tensors, ranks: Ranks) -> Plan:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{name} is not a tensor")
    return create_default_local_save_plan(dict(tensors), ranks.rank == 0).items


def _divide(items: Plan, rank: int) -> dict[str, Plan]:
    """The chunks that a rank writes, by the files that it writes them to, which are of about the same size."""
    count = max(1, min(threads(), sum(map(_size, items)) // SMALLEST_SHARE))
    shares: list[list[WriteItem]] = [[] for _ in range(count)]
    filled = [0] * count
    for item in sorted(items, key=_size, reverse=True):
        smallest = filled.index(min(filled))
        shares[smallest].append(item)
        filled[smallest] += _size(item)
    return {f"__{rank}_{number}.distcp": share for number, share in enumerate(shares)}


def _extents(shares: Mapping[str, Plan]) -> Extents:
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
