"""The index: where each tensor of a checkpoint lies, in JSON.

torch.distributed.checkpoint keeps its metadata as a pickle, which runs code when it is loaded. Here it is `index.json`,
checked before DCP sees it: name -> dtype, size and chunks, and for each chunk its offsets and sizes in the tensor, its
file, and where in the file its bytes start.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from forge_core.checkpoint.manifest import own_file
from forge_core.checkpoint.ranks import describe_fault
from forge_core.contracts.errors import CheckpointError

INDEX = "index.json"


@frozen
class Extent:
    """Where the bytes of a chunk lie."""

    file: str
    start: int


def index_to_json(metadata: Metadata, extents: Mapping[MetadataIndex, Extent]) -> str:
    """The index of what was written."""
    entries: Mapping[str, Any] = metadata.state_dict_metadata
    return json.dumps({name: _entry_to_json(name, entry, extents) for name, entry in entries.items()})


def read_index(folder: Path) -> Metadata:
    """The index of a checkpoint; `storage_data` holds an `Extent` for every chunk.

    Raises:
        CheckpointError: it is missing, or not of the form that is written here.
    """
    storage: dict[MetadataIndex, Extent] = {}
    try:
        entries = json.loads((folder / INDEX).read_text())
        tensors: dict[str, Any] = {name: _entry_from_json(name, entry, storage) for name, entry in entries.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / INDEX}: {describe_fault(error)}") from error
    return Metadata(state_dict_metadata=tensors, storage_data=storage)


def _entry_to_json(
    name: str, entry: TensorStorageMetadata, extents: Mapping[MetadataIndex, Extent]
) -> Mapping[str, Any]:
    chunks = []
    for chunk in entry.chunks:
        extent = extents[MetadataIndex(name, chunk.offsets)]
        place = {"file": extent.file, "start": extent.start}
        chunks.append({"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), **place})
    dtype = str(entry.properties.dtype).removeprefix("torch.")
    return {"dtype": dtype, "size": list(entry.size), "chunks": chunks}


def _entry_from_json(
    name: str, entry: Mapping[str, Any], storage: dict[MetadataIndex, Extent]
) -> TensorStorageMetadata:
    """One tensor; adds its chunks to `storage`."""
    dtype = getattr(torch, entry["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"not a dtype: {entry['dtype']!r}")
    chunks = []
    for number, chunk in enumerate(entry["chunks"]):
        offsets, sizes = torch.Size(chunk["offsets"]), torch.Size(chunk["sizes"])
        storage[MetadataIndex(name, offsets, number)] = Extent(own_file(chunk["file"]), int(chunk["start"]))
        chunks.append(ChunkStorageMetadata(offsets, sizes))
    size = torch.Size(entry["size"])
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
        raise ValueError(f"the chunks of {name} are not the whole of it")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)
