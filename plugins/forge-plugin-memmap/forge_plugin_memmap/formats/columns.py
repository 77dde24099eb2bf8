"""What formats with a column of ids have in common: they are found by its name, and unpacked.

The libraries that read them are imported where a file of theirs is met.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attrs import frozen

from forge_core.contracts.errors import JobError
from forge_plugin_memmap.formats.kind import Candidate, TokenFormat
from forge_plugin_memmap.shards import PackedDocuments, Shard

if TYPE_CHECKING:
    import numpy as np

ROWS = 1024
"""Rows that are read at a time."""


@frozen
class ColumnDocuments:
    """What `PackedDocuments` of columns have in common: a derived class yields `batches`."""

    path: str
    keys: tuple[str, ...]
    """The column of ids and, perhaps, of masks."""
    width: int = 4

    @property
    def is_masked(self) -> bool:
        """See `PackedDocuments`."""
        return len(self.keys) == 2


@frozen(kw_only=True)
class ColumnFormat(TokenFormat):
    """Files with a column that has the ids of a document in each row. Rows are unpacked into the cache once."""

    column: str = "input_ids"
    """Name of the column of ids, each row a list of integers."""
    mask_column: str | None = None
    """Name of a column of lists of equal length, with 1 or true for each token that is learned; by default all are."""

    @abstractmethod
    def is_file(self, file: Candidate) -> bool:
        """Whether the file is of this library, by its first bytes or its name; columns aside."""

    @abstractmethod
    def columns(self, file: Candidate) -> dict[str, bool]:
        """Returns the names of all columns, each with whether it has lists of integers. Raises `JobError`."""

    @abstractmethod
    def documents(self, file: Candidate) -> PackedDocuments:
        """Returns the documents of a file that has the columns. Raises `JobError` where it is damaged."""

    def recognises(self, file: Candidate) -> bool:
        """By the column of ids."""
        if not self.is_file(file):
            return False
        try:
            return self.columns(file).get(self.column, False)
        # Nobody else will claim it, and `shard` names the damage
        except JobError:
            return True

    def refusal(self, file: Candidate) -> str:
        """Which columns there are instead."""
        if not self.is_file(file):
            return ""
        names = ", ".join(self.columns(file))
        return (
            f"it has no column {self.column!r} of lists of integers; its columns are {names}, of which `column` is one"
        )

    def shard(self, file: Candidate) -> Shard:
        """The shard, packed."""
        columns = self.columns(file)
        for name in (self.column, self.mask_column):
            if name is not None and not columns.get(name):
                raise JobError(f"{file.path} has no column {name!r} of lists of numbers; it has {', '.join(columns)}")
        return Shard(file.absolute, "<u4", 0, 0, packed=self.documents(file), stamps=file.stamps([]))


def arrow_columns(schema: Any) -> dict[str, bool]:
    """The columns of a schema of Arrow, each with whether it has lists of integers, or of truth values."""
    from pyarrow import types

    def is_list(kind: Any) -> bool:
        if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
            return False
        return types.is_integer(kind.value_type) or types.is_boolean(kind.value_type)

    return {field.name: is_list(field.type) for field in schema}


def arrow_width(schema: Any, column: str) -> int:
    """Bytes that every id of a column fits into, if it is not negative: 2 or 4."""
    return 2 if schema.field(column).type.value_type.bit_width <= 16 else 4


def arrow_batch(path: str, row: int, columns: Sequence[Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Documents of some rows; see `PackedDocuments.batches`.

    Args:
        path: the file, for errors.
        row: number of the first row, from 1.
        columns: arrays of Arrow: of ids and, perhaps, of masks.

    Raises:
        JobError: a row is null, has a null in it, or its mask is of another length.
    """
    import numpy as np
    from pyarrow import compute

    # Flattened by Arrow: a list of Python for each row would take most of the time
    flat = []
    lengths = []
    for column in columns:
        values = column.flatten()
        if column.null_count or values.null_count:
            raise JobError(f"{path}: one of the {len(column)} rows from {row} on is null, or has a null; leave it out")
        flat.append(values.to_numpy(zero_copy_only=False))
        lengths.append(compute.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.int64))
    if len(flat) == 2 and not np.array_equal(*lengths):
        bad = row + int(np.flatnonzero(lengths[0] != lengths[1])[0])
        raise JobError(f"{path}: the mask of row {bad} has another length than its ids")
    return flat[0], np.cumsum(lengths[0]), flat[1] if len(flat) == 2 else None
