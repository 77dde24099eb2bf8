"""Format `mds`: shards of MosaicML's streaming (`base/format/mds/writer.py`), as LLM Foundry's.

`index.json` lists the shards of a folder. A shard has the number of its samples, where each begins and the last one
ends (uint32), the description of its columns as JSON, and the samples, perhaps all compressed. Ids are one column of a
sample, so that they do not lie together: shards are unpacked into the cache.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from attrs import frozen

from forge_core.contracts.errors import JobError
from forge_plugin_memmap.formats.kind import Candidate, TokenFormat
from forge_plugin_memmap.remote import open_file
from forge_plugin_memmap.shards import Shard

if TYPE_CHECKING:
    import numpy as np

INDEX = "index.json"
COLUMNS = ("column_names", "column_encodings", "column_sizes")
DTYPES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 32: "uint32", 33: "int32", 64: "uint64", 65: "int64"}
"""Types of integers by their codes in an array that states its own."""
SAMPLES = 1024
"""Samples that are unpacked at a time."""


@frozen
class Samples:
    """The samples of a shard."""

    path: str
    column: str
    encoding: str
    """Of the column: `ndarray`, `ndarray:int32`, `ndarray:int32:2048`; or `bytes` of ids, with a dtype."""
    dtype: str
    """Of ids that are plain bytes; empty: not stated."""
    columns: tuple[tuple[str, int | None], ...]
    """Names and sizes of all columns, in their order; None: a sample states the size."""
    described: str
    """The description of its columns that the shard must have, as JSON."""
    bounds: tuple[int, int]
    """Samples, and bytes of the shard when it is not compressed."""
    is_compressed: bool
    hashes: tuple[tuple[str, str], ...]
    """Digests of the file, by algorithm."""
    mask_column: str = ""
    """Column of masks; empty: all tokens are learned."""
    mask_encoding: str = ""
    """Its encoding; plain `bytes` have one byte for each token."""

    @property
    def keys(self) -> tuple[str, ...]:
        """See `PackedDocuments`."""
        return self.column, self.dtype, *([self.mask_column] if self.mask_column else [])

    @property
    def width(self) -> int:
        """See `PackedDocuments`."""
        return 2 if self._stated.removeprefix("u") in ("int8", "int16") else 4

    @property
    def is_masked(self) -> bool:
        """See `PackedDocuments`."""
        return bool(self.mask_column)

    def batches(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
        """See `PackedDocuments`. One shard at a time is in memory: 64 MiB by streaming's default."""
        import numpy as np

        # Whole, as a sum or a compression is of the whole
        data = self._content()
        places = self._places(data)
        for first in range(0, len(places) - 1, SAMPLES):
            bounds = places[first : first + SAMPLES + 1].tolist()
            samples = [self._values(data[start:end]) for start, end in pairwise(bounds)]
            ids = [_decoded(self.path, each[self.column], self.encoding, self.dtype) for each in samples]
            masks = [self._mask(each, len(part)) for each, part in zip(samples, ids, strict=True)]
            learned = np.concatenate(masks) if self.mask_column else None
            yield np.concatenate(ids), np.cumsum([len(part) for part in ids]), learned

    @property
    def _stated(self) -> str:
        return self.dtype or self.encoding.split(":")[1] if ":" in self.encoding or self.dtype else ""

    def _content(self) -> bytes:
        with open_file(self.path) as file:
            data = file.read()
        for name, digest in self.hashes:
            if hashlib.new(name, data).hexdigest() != digest:
                raise JobError(f"{self.path}: its {name} is not the one in {INDEX}: it is damaged")
        if self.is_compressed:
            data = _decompressed(self.path, data, self.bounds[1])
        if len(data) != self.bounds[1]:
            raise JobError(f"{self.path} has {len(data)} bytes, and {INDEX} lists {self.bounds[1]}: it is damaged")
        return data

    def _places(self, data: bytes) -> np.ndarray:
        """Where samples begin, and the last one ends."""
        import numpy as np

        samples = self.bounds[0]
        places = np.frombuffer(data, "<u4", samples + 1, 4).astype(np.int64)
        header = 4 * (samples + 2)
        description = data[header : places[0]]
        if int.from_bytes(data[:4], "little") != samples or places[-1] != len(data) or (np.diff(places) < 0).any():
            raise JobError(f"{self.path}: its header does not list {samples} samples: it is damaged")
        # The shard has its own copy of what the index states of its columns
        if _description(self.path, description) != self.described:
            raise JobError(f"{self.path}: its columns are not as {INDEX} lists them: one of both is damaged")
        return places

    def _mask(self, sample: Mapping[str, bytes], length: int) -> np.ndarray:
        """Which tokens of a sample are learned, (length,) bool."""
        import numpy as np

        if not self.mask_column:
            return np.ones(length, bool)
        mask = _decoded(self.path, sample[self.mask_column], self.mask_encoding, "uint8")
        if len(mask) != length:
            raise JobError(
                f"{self.path}: a mask has {len(mask)} entries, and its sample {length} ids; correct its writer"
            )
        if len(mask) and (mask.min() < 0 or mask.max() > 1):
            raise JobError(f"{self.path}: a mask in {self.mask_column!r} has {mask.max()}; entries are 0 or 1")
        return mask.astype(bool)

    def _values(self, sample: bytes) -> dict[str, bytes]:
        """The columns of a sample."""
        import numpy as np

        # Sizes of columns that vary come first, then all columns in their order
        sized = [name for name, size in self.columns if size is None]
        given = dict(zip(sized, np.frombuffer(sample, "<u4", len(sized)).tolist(), strict=True))
        start = 4 * len(sized)
        values = {}
        for name, size in self.columns:
            length = given[name] if size is None else size
            values[name] = sample[start : start + length]
            start += length
        if start != len(sample):
            raise JobError(f"{self.path}: the columns of a sample have {start} bytes, and it has {len(sample)}")
        return values


@frozen(kw_only=True)
class Mds(TokenFormat):
    """Shards of MosaicML's streaming (MDS). They are unpacked into the cache once."""

    column: str = "tokens"
    """Name of the column of ids: an array of integers in one dimension, or bytes of `dtype`."""
    dtype: Literal["uint8", "uint16", "uint32", "uint64", "int16", "int32", "int64"] | None = None
    """Type of ids that are kept as plain `bytes`, which state none."""
    mask_column: str = ""
    """Name of a column with an array as long as the ids, or bytes, that has 1 for tokens that are learned, and 0 for
    others; empty: all are learned."""

    def suffixes(self) -> tuple[str, ...]:
        """Of shards, compressed ones too."""
        return (".mds", ".mds.zstd")

    def recognises(self, file: Candidate) -> bool:
        """By the index, which lists it."""
        return os.path.basename(file.path) in file.entries(INDEX, _shards)

    def refusal(self, file: Candidate) -> str:
        """Without an index."""
        return f"{INDEX} beside it does not list it" if file.path.endswith(self.suffixes()) else ""

    def shard(self, file: Candidate) -> Shard:
        """Raises `JobError` where it is not as its index describes it, or a shard is missing."""
        index = os.path.join(os.path.dirname(file.absolute), INDEX)
        entry = file.entries(INDEX, _shards)[os.path.basename(file.path)]
        try:
            missing = file.surroundings.missing_part(index, _missing(file, file.folder_table(INDEX)))
            if missing:
                raise JobError(f"{index} lists {missing}, which is missing")
            packed = self._samples(file, index, entry)
        # What damage makes of a table: other types, and other names of keys
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise JobError(
                f"{index} does not describe {os.path.basename(file.path)} ({error!r}): it is damaged"
            ) from error
        return Shard(file.absolute, "<u4", 0, 0, packed=packed, stamps=file.stamps([index]))

    def _samples(self, file: Candidate, index: str, entry: Mapping[str, Any]) -> Samples:
        name = os.path.basename(file.path)
        is_compressed = name != entry["raw_data"]["basename"]
        info = entry["zip_data"] if is_compressed else entry["raw_data"]
        # Both would be in the corpus, and each document twice
        if is_compressed and file.has(os.path.join(os.path.dirname(file.absolute), entry["raw_data"]["basename"])):
            raise JobError(f"{file.path} is there twice, also as {entry['raw_data']['basename']}; remove one of both")
        if is_compressed and str(entry["compression"]).partition(":")[0] != "zstd":
            raise JobError(f"{file.path}: compression {entry['compression']!r} cannot be read; zstd can, and none")
        if entry["version"] != 2 or entry["format"] != "mds":
            raise JobError(
                f"{index}: version {entry['version']} of format {entry['format']!r}; version 2 of mds can be read"
            )
        if info["bytes"] != file.size:
            message = f"{file.path} has {file.size} bytes, and {INDEX} lists {info['bytes']}"
            raise JobError(f"{message}: it was cut short, or the index is of other data")
        names, encodings, sizes = (entry[key] for key in COLUMNS)
        if self.column not in names:
            raise JobError(f"{index} lists no column {self.column!r}, but {', '.join(names)}; set column of the format")
        encoding = encodings[names.index(self.column)]
        _check_encoding(index, encoding, self.dtype)
        if self.mask_column and self.mask_column not in names:
            known = ", ".join(names)
            raise JobError(f"{index} lists no column {self.mask_column!r}, but {known}; set mask_column of the format")
        mask_encoding = encodings[names.index(self.mask_column)] if self.mask_column else ""
        if self.mask_column and mask_encoding != "bytes":
            _check_encoding(index, mask_encoding, None)
        return Samples(
            path=file.absolute,
            column=self.column,
            encoding=encoding,
            dtype=self.dtype or "",
            columns=tuple(zip(names, sizes, strict=True)),
            described=json.dumps([names, encodings, sizes]),
            bounds=(int(entry["samples"]), int(entry["raw_data"]["bytes"])),
            is_compressed=is_compressed,
            mask_column=self.mask_column,
            mask_encoding=mask_encoding,
            hashes=tuple((key, value) for key, value in info["hashes"].items() if key in hashlib.algorithms_guaranteed),
        )


def _check_encoding(index: str, encoding: str, dtype: str | None) -> None:
    if encoding == "bytes" and dtype is None:
        message = f"{index}: ids are plain bytes, whose type nothing states"
        raise JobError(f'{message}; write format = {{ type = "mds", dtype = "int64" }}, with their type')
    if encoding != "bytes" and dtype is not None:
        raise JobError(f"{index}: ids are {encoding!r}, which states their type; leave out dtype")
    name, *more = encoding.split(":")
    if encoding != "bytes" and (name != "ndarray" or (more and more[0] not in DTYPES.values())):
        raise JobError(f"{index}: the column has the encoding {encoding!r}; ids are arrays of integers, or bytes")


def _shards(table: Any) -> Mapping[str, Mapping[str, Any]]:
    """The shards of an index of streaming, by the names of their files; none of another file."""
    if not isinstance(table, dict) or not isinstance(table.get("shards"), list):
        return {}
    named: dict[str, Mapping[str, Any]] = {}
    for shard in table["shards"]:
        for key in ("raw_data", "zip_data"):
            info = shard.get(key) if isinstance(shard, dict) else None
            if isinstance(info, dict):
                named[str(info.get("basename"))] = shard
    return named


def _missing(file: Candidate, table: Any) -> Iterator[str]:
    """One name of each shard: the one that is there, or else the one that should be."""
    folder = os.path.dirname(file.absolute)
    for shard in table["shards"]:
        names = [shard[key]["basename"] for key in ("zip_data", "raw_data") if shard[key]]
        yield next((name for name in names if file.has(os.path.join(folder, name))), names[0])


def _description(path: str, text: bytes) -> str:
    try:
        table = json.loads(text)
        return json.dumps([table[key] for key in COLUMNS])
    except (ValueError, KeyError, TypeError) as error:
        raise JobError(f"{path}: its columns cannot be read ({error!r}): it is damaged") from error


def _decompressed(path: str, data: bytes, size: int) -> bytes:
    try:
        import zstandard
    except ImportError as error:
        raise JobError(f"{path} is compressed; run: pip install forge-plugin-memmap[mds]") from error
    try:
        # As a stream: all at once, a damaged frame may ask for any amount of memory
        return zstandard.ZstdDecompressor().stream_reader(data).read(size + 1)
    except zstandard.ZstdError as error:
        raise JobError(f"{path}: cannot be decompressed ({error}): it is damaged") from error


def _decoded(path: str, value: bytes, encoding: str, dtype: str) -> np.ndarray:
    """Ids of a sample, (T,)."""
    import numpy as np

    parts = encoding.split(":")
    place = 0
    if encoding != "bytes":
        dtype = parts[1] if len(parts) > 1 else DTYPES.get(value[0] if value else -1, "")
        place += len(parts) == 1
        if not dtype:
            raise JobError(f"{path}: the type of an array, {value[:1].hex()}, is no integer's; ids are integers")
        if len(parts) < 3:
            # Two bits are the width of a number of the shape, the others how many there are
            shape = value[place] if len(value) > place else 0
            width = 1 << (shape & 3)
            if shape >> 2 != 1:
                raise JobError(f"{path}: an array of {shape >> 2} dimensions; ids are in one")
            length = int.from_bytes(value[place + 1 : place + 1 + width], "little")
            place += 1 + width
        else:
            length = int(parts[2])
    kind = np.dtype(dtype).newbyteorder("<")
    if (len(value) - place) % kind.itemsize or (encoding != "bytes" and len(value) - place != length * kind.itemsize):
        raise JobError(f"{path}: an array has {len(value) - place} bytes, which are not its ids: it is damaged")
    return np.frombuffer(value, kind, offset=place)
