"""DCP with an index in JSON.

torch.distributed.checkpoint keeps its metadata as a pickle, and whatever is not a tensor as pickled bytes; loading
either runs code. Here the metadata is JSON, checked before DCP sees it, only tensors are stored, and they load with
`weights_only=True`.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from forge_core.errors import CheckpointError

INDEX = "index.json"


class JsonIndexWriter(FileSystemWriter):
    """Writes `index.json` in place of `.metadata`."""

    def finish(self, metadata: Metadata, results: Any) -> None:
        super().finish(metadata, results)
        folder = Path(self.path)
        (folder / INDEX).write_text(json.dumps(_to_json(metadata)))
        (folder / ".metadata").unlink()


class JsonIndexReader(FileSystemReader):
    """Reads what `JsonIndexWriter` wrote."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if kwargs.get("rank") is not None:
            raise FileNotFoundError("one index serves all ranks")
        metadata = read_index(Path(self.path))
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class TensorsOnly(DefaultLoadPlanner):
    """Refuses items that are not tensors, which the stock planner would unpickle."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(
            f"{read_item.dest_index.fqn} is not a tensor ({LoadItemType.BYTE_IO}); refusing to unpickle it"
        )


def read_index(folder: Path) -> Metadata:
    """The index of a checkpoint.

    Raises:
        CheckpointError: it is missing, or not of the form that is written here.
    """
    try:
        return _from_json(json.loads((folder / INDEX).read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / INDEX}: {type(error).__name__}: {error}") from error


def _to_json(metadata: Metadata) -> dict[str, Any]:
    tensors = {}
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata), name
        chunks = [[list(chunk.offsets), list(chunk.sizes)] for chunk in entry.chunks]
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "size": list(entry.size), "chunks": chunks}
    storage = [
        [index.fqn, list(index.offset or ()), index.index, info.relative_path, info.offset, info.length]
        for index, info in (metadata.storage_data or {}).items()
    ]
    return {"tensors": tensors, "storage": storage}


def _from_json(data: Mapping[str, Any]) -> Metadata:
    tensors: dict[str, Any] = {name: _tensor_entry(entry) for name, entry in data["tensors"].items()}
    storage = {}
    for name, offset, index, file, start, length in data["storage"]:
        if "/" in file or file.startswith("."):
            raise ValueError(f"not a file of a checkpoint: {file!r}")
        storage[MetadataIndex(name, torch.Size(offset), index)] = _StorageInfo(file, int(start), int(length))
    return Metadata(state_dict_metadata=tensors, storage_data=storage)


def _tensor_entry(entry: Mapping[str, Any]) -> TensorStorageMetadata:
    dtype = getattr(torch, entry["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"not a dtype: {entry['dtype']!r}")
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in entry["chunks"]]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(entry["size"]), chunks)
