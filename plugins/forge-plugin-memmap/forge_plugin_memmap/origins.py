"""Reading where documents come from: `NAME.origins`, a Parquet file beside a shard of `data prepare`.

Row n is the document that ends at entry n of the shard's index. `file` is the input as the command was given it,
`line` its line or row, from 1, null where a file is one document; further columns have what was kept of the document
as text, null where it had none: by default `id` and `origin`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from attrs import frozen

from forge_core.contracts.errors import DataError
from forge_kit.data.origins import Origin
from forge_plugin_memmap.remote import open_file

if TYPE_CHECKING:
    import numpy as np

ORIGINS = ".origins"
FILE, LINE = "file", "line"
KEPT = ("id", "origin")
"""Fields that are kept with a document by default, where it has them."""
FORMAT_KEY, FORMAT = "forge_origins", 1
"""Key and value of the file's own metadata."""


class DocumentOrigins(Protocol):
    """Where the documents of a shard come from. Plain data, as `DocumentEnds`; nothing is read before `read`."""

    def read(self, numbers: np.ndarray) -> Sequence[Origin | None]:
        """Returns the origin of each document, by its ascending number (D,) in the shard.

        Raises:
            DataError: the file is damaged.
        """
        ...


@frozen
class OriginTable:
    """`NAME.origins`."""

    path: str

    def read(self, numbers: np.ndarray) -> list[Origin | None]:
        """Reads the row groups that these documents are in, and no other."""
        import numpy as np
        import pyarrow as pa
        from pyarrow import parquet

        found: list[Origin | None] = []
        try:
            with open_file(self.path) as source, parquet.ParquetFile(source) as file:
                if (file.schema_arrow.metadata or {}).get(FORMAT_KEY.encode()) != str(FORMAT).encode():
                    raise DataError(f"{self.path} does not have the origins of documents in format {FORMAT}")
                sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
                ends = np.cumsum(sizes)
                if len(numbers) and numbers[-1] >= file.metadata.num_rows:
                    raise DataError(f"{self.path} has {file.metadata.num_rows} documents, and its shard has more")
                groups = np.searchsorted(ends, numbers, side="right")
                for group in np.unique(groups):
                    places = numbers[groups == group] - (ends[group] - sizes[group])
                    found += map(_origin, file.read_row_group(int(group)).take(pa.array(places)).to_pylist())
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{self.path}: cannot be read ({error}); restore it from a copy") from error
        return found


def _origin(row: dict[str, object]) -> Origin:
    file, line = row.pop(FILE), row.pop(LINE)
    fields = {name: str(value) for name, value in row.items() if value is not None}
    return Origin(str(file), line if isinstance(line, int) else None, fields)
