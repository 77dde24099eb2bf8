"""Parquet files: one document a row."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import frozen

from forge_core.contracts.errors import JobError
from forge_plugin_memmap.prepare.documents import BLOCK, Drop, Fields, Place, Read, Text, kept_value

MOST_ROWS = 1 << 14
"""Rows read at a time, however short they are."""
BUFFER = 1 << 20
"""Bytes read at a time of a column; without a buffer, all of a row group would be."""


@frozen
class Rows:
    """Some rows of a file."""

    name: str
    first: int
    """Number of the first row, counted from 1."""
    values: tuple[bytes | None, ...]
    kept: Sequence[tuple[bytes, ...]] = ()
    """Kept values of each row; empty: no row has any."""

    def documents(self) -> Iterator[Text | Drop]:
        """Yields the text of each row, or why it has none; places are `NAME:ROW`, from 1."""
        for number, value in enumerate(self.values):
            kept = self.kept[number] if self.kept else ()
            yield _parse(value, Place(self.name, self.first + number), kept)


def _parse(value: bytes | None, where: Place, kept: tuple[bytes, ...]) -> Text | Drop:
    if not value:
        return Drop(where, "empty", "") if value is not None else Drop(where, "not a string", "null")
    try:
        return Text(where, value.decode(), len(value), kept=kept)
    except UnicodeDecodeError as error:
        return Drop(where, "not UTF-8", f"byte {error.start} of the text, 0x{value[error.start]:02x}: {error.reason}")


def read_rows(path: str, fields: Fields, at: Mapping[str, int], end: Mapping[str, int]) -> Iterator[Read]:
    """Yields the rows of a file between two places: the number of rows before each. The `end` begins a row group.

    Raises:
        JobError: the file is damaged.
    """
    import pyarrow

    try:
        with open_parquet(path) as file:
            yield from _batches(file, path, fields, at.get("row", 0), end.get("row"))
    except (pyarrow.ArrowException, OSError) as error:
        raise JobError(f"{path}: cannot be read as Parquet ({error}); make the file again") from error


def _batches(file: Any, path: str, fields: Fields, start: int, stop: int | None) -> Iterator[Read]:
    known = set(file.schema_arrow.names)
    # The text once, also where it is kept as well
    columns = list(dict.fromkeys([fields.text, *(name for name in fields.kept if name in known)]))
    total = max(file.metadata.num_rows, 1)
    size = os.path.getsize(path)
    for group, before in row_groups(file, start, stop):
        row = before
        for batch in file.iter_batches(_rows_at_once(file, group, fields.text), row_groups=[group], columns=columns):
            # Batches begin with a row group, so a command that continues decodes its rows before the place again
            skipped = min(max(start - row, 0), len(batch))
            values = _bytes_of(batch.column(fields.text)[skipped:])
            row += skipped
            if values:
                read = sum(len(value or b"") for value in values)
                # Bytes in proportion to the rows, since the size of a batch on disk is not known
                rows = Rows(path, row + 1, values, _kept_of(batch.slice(skipped), fields))
                yield Read({"row": row}, size * row // total, rows, read)
            row += len(values)


def row_groups(file: Any, start: int, stop: int | None) -> Iterator[tuple[int, int]]:
    """Yields the row groups of an open file that have rows between two places, by the footer alone.

    Args:
        file: as `open_parquet` returns it.
        start: rows before the first place; within a row group if a command continues.
        stop: rows before the second one, which begins a row group; None: the end.

    Yields:
        The number of a row group, and the rows before it.
    """
    before = 0
    for group in range(file.num_row_groups):
        count = file.metadata.row_group(group).num_rows
        if before == stop:
            return
        if before + count > start:
            yield group, before
        before += count


def _kept_of(batch: Any, fields: Fields) -> Sequence[tuple[bytes, ...]]:
    """Returns the kept values of each row; empty if the file has none of these columns."""
    names = batch.schema.names
    if not any(name in names for name in fields.kept):
        return ()
    nothing = [None] * len(batch)
    columns = [batch.column(name).to_pylist() if name in names else nothing for name in fields.kept]
    return [tuple(map(kept_value, row)) for row in zip(*columns, strict=True)]


def cut_rows(path: str, byte: int) -> Mapping[str, int]:
    """Returns the place of the first row group that begins at or after a byte, each row counted as equally long."""
    import pyarrow

    row, size = 0, os.path.getsize(path)
    try:
        with open_parquet(path) as file:
            for group in range(file.num_row_groups):
                if size * row >= byte * file.metadata.num_rows:
                    break
                row += file.metadata.row_group(group).num_rows
    except (pyarrow.ArrowException, OSError) as error:
        raise JobError(f"{path}: cannot be read as Parquet ({error}); make the file again") from error
    return {"row": row}


def _rows_at_once(file: Any, group: int, field: str) -> int:
    """Returns the number of rows that make about one block."""
    column = file.metadata.row_group(group).column(_column_number(file, field))
    each = max(column.total_uncompressed_size // max(column.num_values, 1), 1)
    return int(min(max(BLOCK // each, 1), MOST_ROWS))


def _column_number(file: Any, field: str) -> int:
    return next(n for n in range(len(file.schema.names)) if file.schema.column(n).path == field)


def _bytes_of(column: Any) -> tuple[bytes | None, ...]:
    # Bytes and not strings: decoding a column fails as a whole for one row that is not UTF-8.
    import pyarrow

    plain = column.dictionary_decode() if pyarrow.types.is_dictionary(column.type) else column
    return tuple(plain.cast(pyarrow.large_binary()).to_pylist())


def open_parquet(path: str) -> Any:
    """Opens a Parquet file whose row groups are read a buffer at a time."""
    from pyarrow.parquet import ParquetFile

    # `pre_buffer` would read all of a row group at once.
    return ParquetFile(path, buffer_size=BUFFER, pre_buffer=False)


def parquet_fault(path: str, field: str) -> str:
    """Returns why a file has no texts in the column `field`, empty if it has; reads the footer only."""
    import pyarrow

    try:
        with open_parquet(path) as file:
            schema = file.schema_arrow
    except (pyarrow.ArrowException, OSError) as error:
        return f"{path}: cannot be read as Parquet ({error})"
    if field not in schema.names:
        return f"{path}: no column {field!r}, but {', '.join(schema.names)}; choose one with --field"
    type_ = schema.field(field).type
    # Few different values are stored as a dictionary, as pandas writes categories
    value = type_.value_type if pyarrow.types.is_dictionary(type_) else type_
    is_text = pyarrow.types.is_string(value) or pyarrow.types.is_large_string(value)
    return "" if is_text else f"{path}: column {field!r} holds {type_}, not strings; choose another with --field"
