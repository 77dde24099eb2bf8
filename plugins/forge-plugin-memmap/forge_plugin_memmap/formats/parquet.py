"""Format `parquet`: a column of ids in Parquet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from attrs import frozen

from forge_core.contracts.errors import JobError
from forge_plugin_memmap.formats.columns import (
    ROWS,
    ColumnDocuments,
    ColumnFormat,
    arrow_batch,
    arrow_columns,
    arrow_width,
)
from forge_plugin_memmap.formats.kind import Candidate
from forge_plugin_memmap.remote import open_file

if TYPE_CHECKING:
    import numpy as np

MAGIC = b"PAR1"
BUFFER = 1 << 20
"""Bytes read at a time of a column; without a buffer, all of a row group would be."""


@frozen
class ParquetDocuments(ColumnDocuments):
    """The rows of a file."""

    def batches(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
        """See `PackedDocuments`."""
        import pyarrow
        from pyarrow import parquet

        row = 1
        try:
            # Sums of pages are compared where the writer has made some
            options = {"buffer_size": BUFFER, "page_checksum_verification": True}
            with open_file(self.path) as source, parquet.ParquetFile(source, **options) as file:
                for batch in file.iter_batches(ROWS, columns=list(self.keys)):
                    yield arrow_batch(self.path, row, [batch.column(key) for key in self.keys])
                    row += len(batch)
        except (pyarrow.ArrowException, OSError, ValueError, KeyError) as error:
            raise _damage(self.path, error) from error


@frozen(kw_only=True)
class Parquet(ColumnFormat):
    """Parquet files with a column of ids."""

    def suffixes(self) -> tuple[str, ...]:
        """Of Parquet."""
        return (".parquet",)

    def is_file(self, file: Candidate) -> bool:
        """By the magic."""
        return file.head.startswith(MAGIC)

    def columns(self, file: Candidate) -> dict[str, bool]:
        """By the schema in the footer."""
        return arrow_columns(self._schema(file))

    def documents(self, file: Candidate) -> ParquetDocuments:
        """The rows."""
        keys = (self.column, *([self.mask_column] if self.mask_column else []))
        return ParquetDocuments(file.absolute, keys, arrow_width(self._schema(file), self.column))

    def _schema(self, file: Candidate) -> Any:
        import pyarrow
        from pyarrow import parquet

        try:
            with open_file(file.path) as source:
                return parquet.read_schema(source)
        # Of names that are no UTF-8, too
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise _damage(file.path, error) from error


def _damage(path: str, error: Exception) -> JobError:
    return JobError(f"{path}: cannot be read as Parquet ({error}): it is damaged")
