"""Safetensors files: where each tensor lies in them, and writing them from many places at once.

A file is 8 bytes with the length of its header, the header in JSON, and the bytes of its tensors, one after the other.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import torch
from attrs import frozen
from torch import Tensor

from forge_core.checkpoint.tensors import bytes_of
from forge_core.contracts.errors import CheckpointError, JobError
from forge_plugin_weights.kinds import Part, Shape

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
HEADER_LIMIT = 100_000_000
"""Bytes; the format's own limit."""
ALIGNMENT = 8
"""Bytes at a multiple of which the first tensor begins, as the format demands."""


@frozen
class Place:
    """Where a tensor lies."""

    as_stored: ClassVar[bool] = True
    """Whether the file's bytes are those of the tensor; false for a class whose `read` computes it."""

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
        tensor = torch.empty(self.shape, dtype=self.dtype)
        with self.file.open("rb") as file:
            file.seek(self.start)
            memory = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
            if file.readinto(memory) != self.size:
                raise CheckpointError(f"{self.file} ends before a tensor does; it is truncated")
        return tensor


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
                raise JobError(
                    f"{name} is in {places[name].file.name} and in {path.name}; one of them is of another model"
                )
            places[name] = place
    if (folder / INDEX).is_file():
        _check_index(folder, places)
    return places


def _files(folder: Path) -> Sequence[Path]:
    if not folder.is_dir():
        raise JobError(f"there is no folder {folder}")
    named: Sequence[Path] = []
    if (folder / INDEX).is_file():
        named = [folder / name for name in dict.fromkeys(_weight_map(folder).values())]
    elif (folder / "model.safetensors").is_file():
        named = [folder / "model.safetensors"]
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
        names: dict[str, str] = dict(json.loads(path.read_text())["weight_map"])
    except (ValueError, LookupError, TypeError) as error:
        raise JobError(f"{path} is no index of tensors: {type(error).__name__}: {error}") from error
    for name in names.values():
        if name.startswith(".") or "/" in name:
            raise JobError(f"{path} names a file outside of its folder: {name!r}")
    return names


def _check_index(folder: Path, places: Mapping[str, Place]) -> None:
    for name, file in _weight_map(folder).items():
        if name not in places:
            raise JobError(f"{folder / INDEX} says that {name} is in {file}, which does not have it")
        if places[name].file.name != file:
            raise JobError(f"{folder / INDEX} says that {name} is in {file}; it is in {places[name].file.name}")


def _header(path: Path) -> Iterator[tuple[str, Place]]:
    """Yields the tensors of a file; checks that their bytes fill it exactly."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = os.fstat(file.fileno()).st_size
            if not 2 <= length <= min(HEADER_LIMIT, size - 8):
                raise JobError(f"{path} is no safetensors file, or is truncated: its header would have {length} bytes")
            entries = json.loads(file.read(length))
        found = [(name, _place(path, 8 + length, entry)) for name, entry in entries.items() if name != "__metadata__"]
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise JobError(f"{path} is no safetensors file: {type(error).__name__}: {error}") from error
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
        if size > room and groups[-1]:
            groups.append({})
            room = limit
        groups[-1][name] = shape, dtype
        room -= size
    count = len(groups)
    names = [f"model-{n:05}-of-{count:05}{SUFFIX}" for n in range(1, count + 1)] if count > 1 else [f"model{SUFFIX}"]
    return [_plan(folder / name, group) for name, group in zip(names, groups, strict=True)]


def _plan(path: Path, tensors: Mapping[str, tuple[Shape, torch.dtype]]) -> FilePlan:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in tensors.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    starts = {name: len(header) + entries[name]["data_offsets"][0] for name in tensors}
    places = {name: Place(path, starts[name], dtype, shape) for name, (shape, dtype) in tensors.items()}
    return FilePlan(path.name, header, places)


def create(folder: Path, files: Sequence[FilePlan]) -> None:
    """Write the headers, at the final size of each file."""
    for plan in files:
        with (folder / plan.name).open("wb") as file:
            file.write(plan.header)
            file.truncate(plan.size)


class Writer:
    """Writes parts of tensors to files that exist at their final size."""

    def __init__(self, files: Sequence[FilePlan]) -> None:
        self._places = {name: place for plan in files for name, place in plan.places.items()}
        self._files: dict[Path, BinaryIO] = {}
        self._maps: dict[Path, mmap.mmap] = {}

    def write(self, part: Part, values: Tensor, box: tuple[slice, ...] = ()) -> None:
        """Write a part of a published tensor, or a box of it, from values of the part's shape, or the box's."""
        place = self._places[part.theirs]
        if not values.numel():
            return
        # A tensor without memory says where the part lies in the published one, and whether in one piece.
        lies = _boxed(part.of_theirs(torch.empty(place.shape, dtype=place.dtype, device="meta")), part, box)
        if lies.is_contiguous():
            # Not through the mapping: its first touch of each page takes four times as long as writing does.
            file = self._file(place.file)
            file.seek(place.start + int(lies.storage_offset()) * place.dtype.itemsize)
            file.write(bytes_of(values.to(place.dtype)))
        else:
            _boxed(part.of_theirs(self._mapped(place)), part, box).copy_(values)

    def _mapped(self, place: Place) -> Tensor:
        """A view of a tensor's bytes in its file."""
        if place.file not in self._maps:
            self._maps[place.file] = mmap.mmap(self._file(place.file).fileno(), 0)
        raw = torch.frombuffer(self._maps[place.file], dtype=torch.uint8, count=place.size, offset=place.start)
        return raw.view(place.dtype).view(place.shape)

    def _file(self, path: Path) -> BinaryIO:
        if path not in self._files:
            self._files[path] = path.open("r+b")
        return self._files[path]

    def close(self) -> None:
        """Return once all that was written is on the disk."""
        for memory in self._maps.values():
            memory.flush()
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()


def _boxed(there: Tensor, part: Part, box: tuple[slice, ...]) -> Tensor:
    return there.view(part.sizes)[box] if box else there


def index_json(files: Sequence[FilePlan]) -> str:
    """Returns the index that says which file has which tensor."""
    total = sum(place.size for plan in files for place in plan.places.values())
    names = {name: plan.name for plan in files for name in plan.places}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=2) + "\n"
