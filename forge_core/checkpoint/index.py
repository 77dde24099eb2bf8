"""The index: where each tensor of a checkpoint lies, in JSON.

torch.distributed.checkpoint keeps its metadata as a pickle, which runs code when it is loaded. Here it is `index.json`,
checked when it is read: name -> dtype, size and chunks, and for each chunk its offsets and sizes in the tensor, its
file, and where in the file its bytes start.

C: chunks of a tensor, D: its dimensions.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from attrs import frozen

from forge_core.checkpoint.manifest import own_file
from forge_core.checkpoint.ranks import describe_fault
from forge_core.contracts.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

INDEX = "index.json"

Place = tuple[str, tuple[int, ...]]
"""A chunk: name and offsets in the tensor."""


@frozen
class Extent:
    """Where the bytes of a chunk lie."""

    file: str
    start: int


@frozen
class Chunk:
    """A part of a tensor, and where its bytes lie."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    extent: Extent


@frozen(eq=False)
class StoredTensor:
    """A tensor of a checkpoint.

    As arrays, since there is a chunk for each tensor of each rank that saved: at 1,024 ranks an object for every one
    takes seconds and hundreds of megabytes.
    """

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

    def chunks(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[Chunk]:
        """The chunks of a tensor that overlap the part of it at `offsets` with `sizes`."""
        stored, first = self.tensors[name], np.asarray(offsets, dtype=np.int64)
        last = first + np.asarray(sizes, dtype=np.int64)
        overlapping = ((stored.offsets < last) & (stored.offsets + stored.sizes > first)).all(axis=1)
        for row in np.flatnonzero(overlapping):
            extent = Extent(self.files[stored.files[row]], int(stored.starts[row]))
            yield Chunk(tuple(stored.offsets[row].tolist()), tuple(stored.sizes[row].tolist()), extent)


def index_to_json(metadata: Metadata, extents: Mapping[Place, Extent]) -> str:
    """The index of a checkpoint that is planned.

    Args:
        metadata: the chunks of all ranks, as a planner of DCP returns it.
        extents: where each of them is written.
    """
    entries: Mapping[str, Any] = metadata.state_dict_metadata
    return json.dumps({name: _entry_to_json(name, entry, extents) for name, entry in entries.items()})


def read_index(folder: Path) -> Index:
    """The index of a checkpoint. The last one read is kept, for the next call.

    Raises:
        CheckpointError: it is missing, or not of the form that is written here.
    """
    path = folder / INDEX
    try:
        status = path.stat()
        return _read(path, (status.st_mtime_ns, status.st_size, status.st_ino))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{path}: {describe_fault(error)}") from error


@functools.lru_cache(maxsize=1)
def _read(path: Path, version: tuple[int, ...]) -> Index:
    return parse_index(path.read_text())


def parse_index(text: str) -> Index:
    """Raises: ValueError, LookupError, TypeError, AttributeError, OverflowError: the text is no index."""
    numbers: dict[str, int] = {}
    tensors = {name: _tensor_from_json(name, entry, numbers) for name, entry in json.loads(text).items()}
    return Index(list(numbers), tensors)


def _entry_to_json(name: str, entry: Any, extents: Mapping[Place, Extent]) -> Mapping[str, Any]:
    chunks = []
    for chunk in entry.chunks:
        extent = extents[name, tuple(chunk.offsets)]
        place = {"file": extent.file, "start": extent.start}
        chunks.append({"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), **place})
    dtype = str(entry.properties.dtype).removeprefix("torch.")
    return {"dtype": dtype, "size": list(entry.size), "chunks": chunks}


def _tensor_from_json(name: str, entry: Mapping[str, Any], numbers: dict[str, int]) -> StoredTensor:
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
    if int(stored.sizes.prod(axis=1).sum()) != math.prod(size):
        raise ValueError(f"the chunks of {name} are not the whole of it")
    return stored
