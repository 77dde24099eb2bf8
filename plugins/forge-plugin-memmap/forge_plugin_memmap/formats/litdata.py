"""Format `litdata`: chunks of litdata's `TokensLoader` (`streaming/writer.py`, `item_loader.py`), as LitGPT's.

`index.json` lists the chunks of a folder and the dtype. A chunk has the number of its items, where each begins and the
last one ends in bytes (uint32), and then the ids of all items, one after the other.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from attrs import frozen

from forge_core.contracts.errors import JobError
from forge_plugin_memmap.formats.kind import Candidate, TokenFormat, read_part
from forge_plugin_memmap.shards import ListedEnds, Shard, without_empty

if TYPE_CHECKING:
    import numpy as np

INDEX = "index.json"
DTYPES = {
    "no_header_tensor": {11: "|u1", 12: "|i1", 13: "<i2", 14: "<i2", 15: "<i4", 16: "<i4", 17: "<i8", 18: "<i8"}
    | {20: "<u2"},
    "no_header_numpy": {0: "|i1", 1: "<i2", 2: "<i4", 3: "<i8", 4: "|u1", 5: "<u2", 6: "<u4", 7: "<u8"},
}  # fmt: skip
"""Types by serializer, and by their number in litdata's tables of dtypes."""


@frozen
class ItemEnds:
    """Where the items of a chunk end: a document is what the function that was optimised yielded at a time."""

    path: str
    items: int
    width: int
    """Bytes of an id."""

    def blocks(self) -> Iterator[np.ndarray]:
        """Raises `JobError` where an item is not of whole ids."""
        import numpy as np

        first = _header_bytes(self.items)
        last = 0
        for places in ListedEnds(self.path, self.items, "<u4", 8).blocks():
            sizes = places.astype(np.int64) - first
            if (sizes % self.width).any():
                raise JobError(f"{self.path}: an item does not end with a whole id; it is damaged")
            ends = sizes // self.width
            yield without_empty(last, ends)
            last = int(ends[-1])


@frozen(kw_only=True)
class LitData(TokenFormat):
    """Chunks of litdata that were written for its `TokensLoader`."""

    def suffixes(self) -> tuple[str, ...]:
        """Of chunks."""
        return (".bin",)

    def recognises(self, file: Candidate) -> bool:
        """By the index, which lists it."""
        return os.path.basename(file.path) in file.entries(INDEX, _chunks)

    def shard(self, file: Candidate) -> Shard:
        """Raises `JobError` where the chunk is not as its index describes it, or a chunk is missing."""
        index = os.path.join(os.path.dirname(file.absolute), INDEX)
        chunks = file.entries(INDEX, _chunks)
        if missing := file.surroundings.missing_part(index, iter(chunks)):
            raise JobError(f"{index} lists {missing}, which is missing")
        dtype = _dtype(index, file.folder_table(INDEX)["config"])
        chunk = chunks[os.path.basename(file.path)]
        items = chunk.get("chunk_size")
        width = int(dtype[-1])
        if not isinstance(items, int) or items < 1 or chunk.get("chunk_bytes") != file.size:
            message = f"{file.path} has {file.size} bytes, and {INDEX} lists {chunk.get('chunk_bytes')}"
            raise JobError(f"{message} of {items} items: it was cut short, or the index is of other data")
        header = _header_bytes(items)
        # The two ends of the table of places: those between are read where documents matter
        bounds = struct.pack("<II", items, header), struct.pack("<I", file.size)
        if file.head[:8] != bounds[0] or read_part(file.path, 4, header - 4) != bounds[1]:
            raise JobError(f"{file.path}: its header does not list {items} items of {file.size} bytes: it is damaged")
        # The only place that states the number of ids, so that an index of another dtype is noticed
        tokens, rest = divmod(file.size - header, width)
        if rest or chunk.get("dim") != tokens:
            message = f"{file.path} has {file.size - header} bytes of ids, and {INDEX} lists {chunk.get('dim')} ids"
            raise JobError(f"{message} of {width}: they are of other data")
        ends = ItemEnds(file.absolute, items, width)
        return Shard(file.absolute, dtype, header, tokens, ends=ends, stamps=file.stamps([index]))


def _header_bytes(items: int) -> int:
    return 4 * (items + 2)


def _chunks(table: Any) -> Mapping[str, Mapping[str, Any]]:
    """The chunks of an index of litdata, by name; none of another file."""
    if not isinstance(table, dict) or not isinstance(table.get("chunks"), list) or "config" not in table:
        return {}
    chunks = [chunk for chunk in table["chunks"] if isinstance(chunk, dict)]
    return {str(chunk.get("filename")): chunk for chunk in chunks}


def _dtype(index: str, config: Any) -> str:
    """The type of the ids; raises `JobError` where chunks are not of plain ids."""
    config = config if isinstance(config, dict) else {}
    for key in ("compression", "encryption"):
        if config.get(key):
            raise JobError(f"{index}: chunks have {key} ({config[key]!r}); write them again without it")
    stated = config.get("data_format")
    name, _, number = str(stated[0] if isinstance(stated, list) and len(stated) == 1 else stated).partition(":")
    if config.get("item_loader") != "TokensLoader" or name not in DTYPES:
        message = f"{index}: chunks of {config.get('item_loader')} with {stated}"
        raise JobError(f"{message} are not plain ids; write them with item_loader=TokensLoader()")
    dtype = DTYPES[name].get(int(number) if number.isdigit() else -1)
    if dtype is None:
        raise JobError(f"{index}: items are of dtype {number} of litdata, and ids are integers")
    return dtype
