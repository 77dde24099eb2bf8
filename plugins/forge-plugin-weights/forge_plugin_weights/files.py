"""Safetensors files: where each tensor lies in them, and writing them from many places at once.

A file is 8 bytes with the length of its header, the header in JSON, and the bytes of its tensors, one after the other.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock, local
from typing import Any, BinaryIO, ClassVar

import torch
from attrs import frozen
from torch import Tensor

from forge_core.checkpoint.tensors import bytes_of
from forge_core.contracts.errors import ForgeError, JobError
from forge_kit.tools.outputs import unfinished
from forge_plugin_weights.kinds import Filler, Part, Shape

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
SUFFIX = ".safetensors"
INDEX = "model.safetensors.index.json"
BLOCK = 1 << 22
"""Bytes of a tensor that are compared, converted or written at a time."""
AROUND = 1 << 20
"""Bytes around a block of a mapped file that leave memory with it."""
HEADER_LIMIT = 100_000_000
"""Bytes; the format's own limit."""
ALIGNMENT = 8
"""Bytes at a multiple of which the first tensor begins, as the format demands."""


@frozen
class Place:
    """Where a tensor lies."""

    as_stored: ClassVar[bool] = True
    """Whether the file holds the tensor's bytes as they are; false for a class whose `read` computes the tensor."""

    file: Path
    start: int
    """Its first byte in the file."""
    dtype: torch.dtype
    shape: Shape

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> Tensor:
        """Returns the tensor."""
        [tensor] = self._blocks(max(1, math.prod(self.shape)))
        return tensor.view(self.shape)

    def equals(self, other: Place) -> bool:
        """Whether two tensors have the same numbers; a block of each is in memory at a time."""
        if not (self.as_stored and other.as_stored):
            return torch.equal(self.read(), other.read())
        count = BLOCK // max(self.dtype.itemsize, other.dtype.itemsize)
        pairs = zip(self._blocks(count), other._blocks(count), strict=True)
        return self.shape == other.shape and all(torch.equal(one, another) for one, another in pairs)

    def _blocks(self, count: int) -> Iterator[Tensor]:
        """Yields its numbers, flat, at most `count` at a time."""
        with self.file.open("rb", buffering=0) as file:
            file.seek(self.start)
            for start in range(0, max(1, math.prod(self.shape)), count):  # an empty tensor is one block
                block = torch.empty(min(count, math.prod(self.shape) - start), dtype=self.dtype)
                if not read_into(file, bytes_of(block)):
                    raise JobError(f"{self.file} ends before a tensor does; it is truncated")
                yield block


@contextmanager
def making(output: Path) -> Iterator[Path]:
    """As `unfinished` for `--out`, where an error of the operating system, such as a full disk, is one of a line.

    Raises:
        JobError: something is at `output` already, or it cannot be written, or a file cannot be read meanwhile.
    """
    try:
        with unfinished(output, "--out") as folder:
            yield folder
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        reason = f"{place}{error.strerror or error}"
        raise JobError(f"--out {output} cannot be made, and nothing is left of it: {reason}") from error


def read_into(file: BinaryIO, memory: memoryview) -> bool:
    """Fill memory from a file that is not buffered; returns whether the file has that much."""
    while memory:  # one call reads 2 GB at most
        count = file.readinto(memory)  # type: ignore[attr-defined]
        if not count:
            return False
        memory = memory[count:]
    return True


def places_in(folder: Path) -> dict[str, Place]:
    """Returns where each tensor of a folder lies, by name.

    Raises:
        JobError: there are no files, one is missing or truncated, or its header is not of the format.
    """
    files = _files(folder)
    places: dict[str, Place] = {}
    for path in files:
        for name, place in _header(path):
            if name in places:
                raise JobError(f"{name} is in {places[name].file} and in {path.name}; one of them is of another model")
            places[name] = place
    if (folder / INDEX).is_file():
        _check_index(folder, places)
    return places


def _files(folder: Path) -> Sequence[Path]:
    named: Sequence[Path] = []
    if (folder / INDEX).is_file():
        named = [folder / name for name in dict.fromkeys(_weight_map(folder).values())]
    elif (folder / "model.safetensors").is_file():
        named = [folder / "model.safetensors"]
    # By the index where there is one: a folder may hold the weights a second time, as `consolidated.safetensors`.
    files = named or sorted(folder.glob(f"*{SUFFIX}"))
    if not files:
        others = sorted(path.name for path in folder.glob("*.bin"))
        hint = (
            f"; {others[0]} is a pickle, which runs code when it is read: convert it with transformers"
            if others
            else ""
        )
        raise JobError(f"{folder} has no {SUFFIX} files{hint}")
    return files


def _weight_map(folder: Path) -> Mapping[str, str]:
    path = folder / INDEX
    try:
        names: dict[str, Any] = dict(json.loads(path.read_text())["weight_map"])
    except (ValueError, LookupError, TypeError) as error:
        raise JobError(f"{path} is no index of tensors: {type(error).__name__}: {error}") from error
    for name in names.values():
        # An index from elsewhere must not make an import read files outside of the folder.
        if not isinstance(name, str) or name.startswith(".") or "/" in name:
            raise JobError(f"{path} names a file outside of its folder: {name!r}")
    return names


def _check_index(folder: Path, places: Mapping[str, Place]) -> None:
    for name, file in _weight_map(folder).items():
        if name not in places:
            raise JobError(f"{folder / INDEX} lists {name} in {file}, which does not contain it")
        if places[name].file.name != file:
            raise JobError(f"{folder / INDEX} lists {name} in {file}, but it is in {places[name].file.name}")


def _header(path: Path) -> Iterator[tuple[str, Place]]:
    """Yields the tensors of a file; checks that their bytes fill it exactly."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = os.fstat(file.fileno()).st_size
            # Before it is read: the length of a damaged file may be any number.
            if not 2 <= length <= min(HEADER_LIMIT, size - 8):
                raise JobError(f"{path} is no safetensors file, or is truncated: its header would have {length} bytes")
            entries = json.loads(file.read(length))
        found = [(name, _place(path, 8 + length, entry)) for name, entry in entries.items() if name != "__metadata__"]
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise JobError(f"{path} is no safetensors file: {type(error).__name__}: {error}") from error
    # The format allows no gaps, so that a file that was cut off is noticed by its header alone.
    end = 8 + length
    for name, place in sorted(found, key=lambda item: item[1].start):
        if place.start != end:
            raise JobError(f"{path}: {name} begins at byte {place.start}, where byte {end} was expected")
        end += place.size
    if end != size:
        raise JobError(f"{path} has {size} bytes, and its header describes {end}: it is truncated or damaged")
    yield from found


def _place(path: Path, start: int, entry: Mapping[str, Any]) -> Place:
    first, end = entry["data_offsets"]
    if entry["dtype"] not in DTYPES:
        raise JobError(f"{path}: dtype {entry['dtype']!r} is not supported; there are {', '.join(DTYPES)}")
    place = Place(path, start + first, DTYPES[entry["dtype"]], tuple(entry["shape"]))
    if end - first != place.size:
        raise ValueError(f"{end - first} bytes for shape {entry['shape']} of {entry['dtype']}")
    return place


# --- writing -----------------------------------------------------------------------------------------------------


@frozen
class FilePlan:
    """A file to be written: its header, and the tensors by name."""

    name: str
    header: bytes
    places: Mapping[str, Place]

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + sum(place.size for place in self.places.values())


def plan_files(folder: Path, shapes: Mapping[str, tuple[Shape, torch.dtype]], limit: int) -> Sequence[FilePlan]:
    """Returns the files that hold tensors of these shapes, in order, each of at most `limit` bytes or one tensor."""
    groups: list[dict[str, tuple[Shape, torch.dtype]]] = [{}]
    room = limit
    for name, (shape, dtype) in shapes.items():
        size = math.prod(shape) * dtype.itemsize
        if size > room and groups[-1]:  # a tensor above the limit has a file to itself
            groups.append({})
            room = limit
        groups[-1][name] = shape, dtype
        room -= size
    count = len(groups)
    names = [f"model-{n:05}-of-{count:05}{SUFFIX}" for n in range(1, count + 1)] if count > 1 else [f"model{SUFFIX}"]
    return [_plan(folder / name, group) for name, group in zip(names, groups, strict=True)]


def _plan(path: Path, tensors: Mapping[str, tuple[Shape, torch.dtype]]) -> FilePlan:
    # Older versions of transformers refuse files without this key.
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in tensors.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)  # spaces, which JSON ignores
    header = len(text).to_bytes(8, "little") + text
    # Offsets in the header count from its end, and places from the start of the file.
    starts = {name: len(header) + entries[name]["data_offsets"][0] for name in tensors}
    places = {name: Place(path, starts[name], dtype, shape) for name, (shape, dtype) in tensors.items()}
    return FilePlan(path.name, header, places)


def create(folder: Path, files: Sequence[FilePlan]) -> None:
    """Write the headers, at the final size of each file."""
    for plan in files:
        with (folder / plan.name).open("wb") as file:
            file.write(plan.header)
            file.truncate(plan.size)  # no bytes yet: ranks and threads write them


class Room:
    """Memory for the bytes of a block in another dtype or order, the same for every block.

    New memory for each would stay with the process: the C library keeps what threads free in blocks of this size.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def bytes_of(self, block: Tensor, dtype: torch.dtype) -> memoryview:
        """Returns the bytes of a tensor in a dtype, valid until the next call."""
        if block.dtype == dtype and block.is_cpu and block.is_contiguous():
            return bytes_of(block)
        return bytes_of(self.copy_of(block, dtype))

    def copy_of(self, block: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns a tensor in a dtype, contiguous, valid until the next call."""
        size = block.numel() * dtype.itemsize
        if size > len(self._memory):
            self._memory = torch.empty(size, dtype=torch.uint8)
        return self._memory[:size].view(dtype).view(block.shape).copy_(block)


class Rooms(local):
    """A `Room` of each thread."""

    def __init__(self) -> None:
        self.own = Room()


class Boxes:
    """Where boxes of Forge's tensors lie in the files of a published model, which exist at their final size.

    Not more than `BLOCK` bytes, or a row, of a file are in memory at a time. Threads may share an object of this class.
    """

    def __init__(self, places: Mapping[str, Place], *, writable: bool = False) -> None:
        self._places, self._writable = places, writable
        self._lock, self._rooms = Lock(), Rooms()
        self._files: dict[Path, int] = {}
        self._maps: dict[Path, mmap.mmap] = {}

    def write(self, part: Part, values: Tensor, offsets: Sequence[int]) -> None:
        """Write what a part has of a box of our tensor.

        Args:
            part: of our tensor.
            values: the box.
            offsets: where it begins in our tensor.
        """
        for place, lies, block in self._blocks(part, values, offsets):
            start = place.start + int(lies.storage_offset()) * place.dtype.itemsize
            if lies.is_contiguous():
                # Not through a mapping: its first touch of each page takes four times as long as writing does.
                self._write_range(place.file, start, self._rooms.own.bytes_of(block, place.dtype))
            else:
                with self._mapped(place, lies) as there:
                    there.copy_(block)

    def fill(self, filler: Filler) -> None:
        """Write a tensor of one number."""
        place = self._places[filler.theirs]
        self._write_range(place.file, place.start, bytes_of(torch.full(place.shape, filler.value, dtype=place.dtype)))

    def compare(self, part: Part, values: Tensor, offsets: Sequence[int]) -> tuple[bool, float]:
        """Returns whether the files have these values, in their own dtype, and the largest error of that rounding."""
        equal, error = True, 0.0
        for place, lies, block in self._blocks(part, values, offsets, comparing=True):
            with self._mapped(place, lies) as there:
                if place.dtype == block.dtype:
                    equal = equal and _same_bits(block, there)
                else:
                    equal = equal and _same_bits(self._rooms.own.copy_of(block, place.dtype), there)
                    error = max(error, (block.double() - there.double()).abs().max().item())
        return equal, error

    def close(self) -> None:
        """Return once all that was written is on the disk."""
        for memory in self._maps.values() if self._writable else ():
            memory.flush()
        # At the same time, as each file waits for the disk
        with ThreadPoolExecutor(max(1, len(self._files))) as pool:
            list(pool.map(_sync_and_close, self._files.values()))
        self._files.clear()

    def _blocks(
        self, part: Part, values: Tensor, offsets: Sequence[int], *, comparing: bool = False
    ) -> Iterator[tuple[Place, Tensor, Tensor]]:
        """Yields, for each block of a box, the file's place, a meta tensor that lies there as it does, and its values.

        Both have their dimensions in the order of the published tensor's memory.
        """
        overlap = part.overlap(values.shape, offsets)
        if overlap is None:
            return
        inside, there = overlap
        place = self._places[part.theirs]
        # A meta tensor has strides and no memory: they show where the part lies in the file.
        lies = part.of_theirs(torch.empty(place.shape, dtype=place.dtype, device="meta"))
        lies = (lies if part.offsets is None else lies.view(part.sizes))[there]
        # The largest stride first, so that a block is one range of the file where that is possible
        order = sorted(range(lies.ndim), key=lies.stride().__getitem__, reverse=True)
        # Differences are computed in float64, which takes several times a block's bytes.
        limit = BLOCK // 16 if comparing and values.dtype != place.dtype else BLOCK
        for of_file, own in _split(lies.permute(order), values[inside].permute(order), limit):
            yield place, of_file, own

    def _write_range(self, path: Path, start: int, data: memoryview) -> None:
        file, end = self._file(path), start + len(data)
        try:
            while data:  # one call writes 2 GB at most
                data = data[os.pwrite(file, data, end - len(data)) :]
        except OSError as error:
            raise ForgeError(f"{path} cannot be written: {error.strerror}") from error
        if hasattr(os, "posix_fadvise"):
            # Starts its way to the disk, so that at the end there is little left to wait for.
            os.posix_fadvise(file, start, end - start, os.POSIX_FADV_DONTNEED)

    @contextmanager
    def _mapped(self, place: Place, lies: Tensor) -> Iterator[Tensor]:
        """The bytes of a file as a tensor that lies as `lies`; they leave the process's memory afterwards."""
        memory = self._map(place.file)
        first = place.start + int(lies.storage_offset()) * place.dtype.itemsize
        raw = torch.frombuffer(memory, dtype=torch.uint8, count=extent(lies), offset=first)
        yield raw.view(place.dtype).as_strided(lies.shape, lies.stride())
        if hasattr(mmap, "MADV_DONTNEED"):
            # With what lies around it, since a fault maps neighbouring pages, too. Others that need them fault again.
            page = max(0, first - AROUND) // mmap.PAGESIZE * mmap.PAGESIZE
            memory.madvise(mmap.MADV_DONTNEED, page, min(len(memory), first + len(raw) + AROUND) - page)

    def _map(self, path: Path) -> mmap.mmap:
        file = self._file(path)
        with self._lock:
            if path not in self._maps:
                access = mmap.ACCESS_WRITE if self._writable else mmap.ACCESS_COPY  # torch wants it writable
                self._maps[path] = mmap.mmap(file, 0, access=access)
            return self._maps[path]

    def _file(self, path: Path) -> int:
        with self._lock:
            if path not in self._files:
                # One descriptor for all threads: `pwrite` and mappings have no shared position.
                self._files[path] = os.open(path, os.O_RDWR if self._writable else os.O_RDONLY)
            return self._files[path]


def writer_of(files: Sequence[FilePlan]) -> Boxes:
    """Returns what writes tensors to files that are planned and created."""
    return Boxes({name: place for plan in files for name, place in plan.places.items()}, writable=True)


def _split(lies: Tensor, values: Tensor, limit: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields both in blocks of whole rows that extend over at most `limit` bytes of the file, or are a number."""
    if extent(lies) <= limit or not lies.ndim:
        yield lies, values
        return
    rows = limit // (lies.stride(0) * lies.itemsize)
    if rows:
        yield from zip(lies.split(rows), values.split(rows), strict=True)
        return
    # A row by itself exceeds the limit, so that it is split along its next dimension.
    for of_file, own in zip(lies, values, strict=True):
        yield from _split(of_file, own, limit)


def extent(tensor: Tensor) -> int:
    """Returns the bytes from a tensor's first number to its last."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + steps) * tensor.itemsize


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bits, NaN included; 0.0 and -0.0 count as the same."""
    # By value first, which makes no copies; NaN does not equal itself, and needs the bits.
    if torch.equal(one, other):
        return True
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.itemsize]
    return torch.equal(one.contiguous().view(whole), other.contiguous().view(whole))


def _sync_and_close(file: int) -> None:
    try:
        os.fsync(file)
    finally:
        os.close(file)


def index_json(files: Sequence[FilePlan]) -> str:
    """Returns the index, which maps each tensor to its file."""
    total = sum(place.size for plan in files for place in plan.places.values())
    names = {name: plan.name for plan in files for name in plan.places}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=2) + "\n"
