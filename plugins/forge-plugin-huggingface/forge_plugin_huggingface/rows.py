"""Rows by number, of a table on disk or of a stream, file by file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from forge_core.contracts.errors import JobError

if TYPE_CHECKING:
    import datasets
    import pyarrow

READ_ROWS = 256
"""Rows of a stream that are read at once."""
RAW_ROWS = 16
"""The same for rows that are not decoded, which may hold images."""


class SourceRow(NamedTuple):
    """A row of a dataset."""

    place: str
    """Its location, for errors: `row 17 of 'data', split 'train'`."""
    values: Mapping[str, Any]


def _all(_number: int) -> bool:
    return True


class StreamRows(Protocol):
    """Rows that are read in order, file by file."""

    name: str
    """The name of the dataset, for errors."""
    files: int

    def read(self, file: int, start: int = 0, wanted: Callable[[int], bool] = _all) -> Iterator[tuple[int, SourceRow]]:
        """Yields the wanted rows of a file from number `start` on, with their numbers; others are not decoded."""
        ...


class TableRows:
    """The rows of a table on disk, with consecutive numbers. As a stream it is split into files of about equal size."""

    def __init__(
        self, table: datasets.Dataset, columns: Sequence[str], name: str, files: int = 1, *, decode: bool = True
    ) -> None:
        """Raises `JobError` if the table lacks a column. See `stream_rows` for `decode`."""
        self._table, self.name, self._decode = _select(table, columns, name), name, decode
        if not decode:
            self._table = self._table.with_format("arrow")
        # No file without rows: its lane would have nothing to read
        self.files = max(1, min(files, len(table)))

    def __len__(self) -> int:
        return len(self._table)

    def read(self, file: int, start: int = 0, wanted: Callable[[int], bool] = _all) -> Iterator[tuple[int, SourceRow]]:
        """Reads a range of the table's rows as one of its files, some rows at a time."""
        first, stop = (len(self) * bound // self.files for bound in (file, file + 1))
        numbers = filter(wanted, range(max(first, start), stop))
        while batch := list(islice(numbers, READ_ROWS if self._decode else RAW_ROWS)):
            yield from zip(batch, self.take(batch), strict=True)

    def take(self, numbers: Sequence[int]) -> list[SourceRow]:
        """Returns the rows with these numbers."""
        rows = self._table[list(numbers)]
        values = _by_row(rows) if self._decode else rows.to_pylist()
        return [SourceRow(f"row {number} of {self.name}", value) for number, value in zip(numbers, values, strict=True)]


class FileRows:
    """The rows of data files, numbered in each. A file is a shard of `datasets`, which is nearly always one file."""

    def __init__(
        self, dataset: datasets.IterableDataset, columns: Sequence[str], name: str, *, decode: bool = True
    ) -> None:
        """Raises `JobError` if the dataset lacks a column. See `stream_rows` for `decode`."""
        self._dataset, self._columns, self.name = _select(dataset, columns, name), columns, name
        self._decode = decode
        self.files: int = dataset.num_shards

    def read(self, file: int, start: int = 0, wanted: Callable[[int], bool] = _all) -> Iterator[tuple[int, SourceRow]]:
        """Reads the file from its start, as Arrow; rows before `start` are decompressed and not decoded."""
        one, first = self._dataset.shard(num_shards=self.files, index=file), 0
        # `iter` and not `for`, which in a DataLoader worker yields only the worker's share of this one file.
        for table in one.with_format("arrow").iter(batch_size=READ_ROWS if self._decode else RAW_ROWS):
            chosen = filter(wanted, range(max(first, start), first + len(table)))
            numbers = np.fromiter(chosen, dtype=np.int64)
            values = self._values(table.take(numbers - first), one.features)
            for number, value in zip(numbers.tolist(), values, strict=True):
                yield number, SourceRow(f"row {number} of file {file} of {self.name}", value)
            first += len(table)

    def _values(self, table: pyarrow.Table, features: datasets.Features | None) -> Iterator[Mapping[str, Any]]:
        if not self._decode:
            return iter(table.select([name for name in self._columns if name in table.column_names]).to_pylist())
        _check_columns(table.column_names, self._columns, self.name)
        columns = table.select(list(self._columns)).to_pydict()
        return _by_row(columns if features is None else features.decode_batch(columns))


def stream_rows(
    dataset: datasets.Dataset | datasets.IterableDataset,
    columns: Sequence[str],
    name: str,
    lanes: int = 1,
    *,
    decode: bool = True,
) -> StreamRows:
    """Returns the rows of a stream, in `lanes` files if the number can be chosen.

    Args:
        dataset: a table, or a stream.
        columns: the columns to read.
        name: the name of the dataset, for errors.
        lanes: number of readers.
        decode: whether values are what their features decode them to. If not, they are as stored: an image is
            `{"bytes": …, "path": …}`; and rows may lack columns.

    Raises:
        JobError: a column is missing, and values are decoded.
    """
    import datasets

    if not decode and dataset.column_names is not None:
        columns = [column for column in columns if column in dataset.column_names]
    if isinstance(dataset, datasets.Dataset):
        return TableRows(dataset, columns, name, files=lanes, decode=decode)
    return FileRows(dataset, columns, name, decode=decode)


def _select(dataset: Any, columns: Sequence[str], name: str) -> Any:
    """Select these columns, so that no others are read or decoded."""
    if dataset.column_names is None:  # some formats have no schema before the first row
        return dataset
    _check_columns(dataset.column_names, columns, name)
    return dataset.select_columns(list(columns))


def _check_columns(names: Sequence[str], columns: Sequence[str], name: str) -> None:
    for column in columns:
        if column not in names:
            there = ", ".join(map(repr, names)) or "none"
            hint = "set `field`, `messages`, or `prompt` and `completion`, to its fields"
            raise JobError(f"{name} has no field {column!r}; {hint}: {there}")


def _by_row(columns: Mapping[str, Sequence[Any]]) -> Iterator[Mapping[str, Any]]:
    return (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
