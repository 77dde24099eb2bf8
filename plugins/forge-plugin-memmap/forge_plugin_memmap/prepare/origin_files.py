"""Where each document comes from, beside the shard that it is written to.

While a shard is written, two files grow with it, which a process that continues can cut where it left off: rows of
plain numbers, and the texts that are kept. From these the whole shard has one Parquet file (`forge_plugin_memmap.
origins`), whose rows are its documents.

D: documents, K: fields that are kept.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from attrs import frozen

from forge_plugin_memmap.origins import FILE, FORMAT, FORMAT_KEY, LINE

ROWS, TEXTS = ".origin_rows", ".origin_texts"
"""Suffixes of the files that grow with a shard."""
DOCUMENTS = 1 << 14
"""Documents of a row group, which is what reading one of them costs."""


class Origins(NamedTuple):
    """Of consecutive documents."""

    inputs: np.ndarray
    """(D,) int32: number of the input."""
    lines: np.ndarray
    """(D,) int64: line or row, from 1; 0: the input is one document."""
    lengths: np.ndarray
    """(D, K) int64: bytes of each text that is kept."""
    texts: np.ndarray
    """uint8: all texts, one after the other."""

    @classmethod
    def of(cls, inputs: Sequence[int], lines: Sequence[int], kept: Sequence[Sequence[bytes]], fields: int) -> Origins:
        """Joins the fields that workers have read; `kept` is empty for a document without any of the K `fields`."""
        nothing = (b"",) * fields
        texts = [text for row in kept for text in row or nothing]
        lengths = np.fromiter(map(len, texts), np.int64, len(texts)).reshape(-1, fields)
        joined = np.frombuffer(b"".join(texts), np.uint8)
        # Without fields, `reshape` cannot derive the number of documents
        shaped = lengths if fields else np.empty((len(inputs), 0), np.int64)
        return cls(np.asarray(inputs, np.int32), np.asarray(lines, np.int64), shaped, joined)

    @classmethod
    def none(cls, fields: int) -> Origins:
        """Of no document."""
        return cls.of((), (), (), fields)

    def cut(self, first: int, stop: int | None = None) -> Origins:
        """Returns the origins of documents [first, stop)."""
        begin, end = int(self.lengths[:first].sum()), int(self.lengths[:stop].sum())
        return Origins(self.inputs[first:stop], self.lines[first:stop], self.lengths[first:stop], self.texts[begin:end])

    def select(self, chosen: np.ndarray) -> Origins:
        """Returns the origins of some documents: (D,) whether each is chosen."""
        texts = self.texts[np.repeat(chosen, self.lengths.sum(1))] if len(self.texts) else self.texts
        return Origins(self.inputs[chosen], self.lines[chosen], self.lengths[chosen], texts)

    def rows(self, before: int) -> np.ndarray:
        """Returns the rows (D,) of `row_type`; `before` bytes of texts are in the file."""
        rows = np.empty(len(self.inputs), row_type(self.lengths.shape[1]))
        rows["input"], rows["line"] = self.inputs, self.lines
        rows["ends"] = before + np.cumsum(self.lengths).reshape(self.lengths.shape)
        return rows


def row_type(fields: int) -> np.dtype:
    """Returns the type of a row: input, line, and where each of its K texts ends in the file of texts."""
    return np.dtype([("input", "<i4"), ("line", "<i8"), ("ends", "<i8", (fields,))])


def bytes_of_texts(rows: Path, documents: int, fields: int) -> int:
    """Returns the size that the file of texts had when there were so many `documents`, by the file of rows."""
    if not documents or not fields:
        return 0
    with rows.open("rb") as file:
        file.seek((documents - 1) * row_type(fields).itemsize)
        return int(np.fromfile(file, row_type(fields), 1)["ends"][0, -1])


def read_origins(rows: Path, texts: Path, first: int, stop: int, fields: int) -> Origins:
    """Returns the origins of documents [first, stop) of a shard that is not a whole one."""
    type_ = row_type(fields)
    # From the row before, whose end is the beginning of these
    skipped = max(first - 1, 0)
    found = np.fromfile(rows, type_, stop - skipped, offset=skipped * type_.itemsize)
    own = found[first - skipped :]
    begin = int(found["ends"][0, -1]) if first and fields else 0
    ends = own["ends"].reshape(-1)
    lengths = np.diff(ends, prepend=begin).reshape(own["ends"].shape)
    count = int(ends[-1]) - begin if len(ends) else 0
    return Origins(own["input"], own["line"], lengths, np.fromfile(texts, np.uint8, count, offset=begin))


@frozen
class OriginWriter:
    """Makes the Parquet file of a shard."""

    names: Sequence[str]
    """Of all inputs."""
    fields: tuple[str, ...]

    def write(self, path: Path, rows: Path, texts: Path) -> dict[str, int]:
        """Write the origins of a whole shard to `path`, on the disk. Memory does not grow with it.

        Returns:
            The number of documents that have each field.
        """
        import pyarrow as pa
        from pyarrow import parquet

        schema = pa.schema(
            [(FILE, pa.string()), (LINE, pa.int64()), *((name, pa.string()) for name in self.fields)],
            metadata={FORMAT_KEY: str(FORMAT)},
        )
        counts = dict.fromkeys(self.fields, 0)
        # Lines ascend, and files repeat: as differences and by a dictionary they take next to nothing
        options: dict[str, Any] = {"use_dictionary": [FILE], "column_encoding": {LINE: "DELTA_BINARY_PACKED"}}
        with path.open("wb") as file:
            with parquet.ParquetWriter(file, schema, compression="zstd", **options) as writer:
                for origins in self._groups(rows, texts):
                    columns = self._columns(origins)
                    for name, column in zip(self.fields, columns[2:], strict=True):
                        counts[name] += len(column) - column.null_count
                    # As one row group: a table would be divided by sizes that depend on the version of pyarrow
                    writer.write_batch(pa.record_batch(columns, schema=schema), row_group_size=DOCUMENTS)
            file.flush()
            os.fsync(file.fileno())
        return counts

    def _groups(self, rows: Path, texts: Path) -> Iterator[Origins]:
        documents = rows.stat().st_size // row_type(len(self.fields)).itemsize
        for first in range(0, documents, DOCUMENTS):
            yield read_origins(rows, texts, first, min(first + DOCUMENTS, documents), len(self.fields))

    def _columns(self, origins: Origins) -> list[Any]:
        import pyarrow as pa

        # Of the inputs of this group alone: there may be a million of them
        numbers, places = np.unique(origins.inputs, return_inverse=True)
        names = pa.array([self.names[number] for number in numbers], pa.string())
        files = pa.DictionaryArray.from_arrays(pa.array(places.astype(np.int32)), names).dictionary_decode()
        lines = pa.array(origins.lines, mask=origins.lines == 0)
        return [files, lines, *(_text_column(origins, number) for number in range(len(self.fields)))]


def _text_column(origins: Origins, number: int) -> Any:
    """Returns the texts of a field as an Arrow array, null where there is none."""
    import pyarrow as pa

    lengths = origins.lengths[:, number]
    # Texts of one document lie together, so a mask of bytes selects one field
    own = np.arange(origins.lengths.shape[1]) == number
    mask = np.repeat(np.broadcast_to(own, origins.lengths.shape).reshape(-1), origins.lengths.reshape(-1))
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype("<i8")
    valid = np.packbits(lengths > 0, bitorder="little")
    buffers = [pa.py_buffer(np.ascontiguousarray(part)) for part in (valid, bounds, origins.texts[mask])]
    return pa.Array.from_buffers(pa.large_string(), len(lengths), buffers).cast(pa.string())
