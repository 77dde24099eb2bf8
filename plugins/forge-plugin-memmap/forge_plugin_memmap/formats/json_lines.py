"""Format `json_lines`: a field of ids in JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from attrs import frozen

from forge_core.contracts.errors import JobError
from forge_plugin_memmap.formats.columns import ROWS, ColumnDocuments, ColumnFormat
from forge_plugin_memmap.formats.kind import Candidate
from forge_plugin_memmap.remote import open_file

if TYPE_CHECKING:
    import numpy as np

TAIL = 1 << 16
"""Bytes of the end of a file that are looked at."""


@frozen
class JsonDocuments(ColumnDocuments):
    """The lines of a file."""

    def batches(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
        """See `PackedDocuments`."""
        parts: list[list[np.ndarray]] = []
        for row in self._rows():
            parts.append(row)
            if len(parts) == ROWS:
                yield self._batch(parts)
                parts = []
        if parts:
            yield self._batch(parts)

    def _batch(self, parts: list[list[np.ndarray]]) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        import numpy as np

        ids, *masks = (np.concatenate(column) for column in zip(*parts, strict=True))
        return ids, np.cumsum([len(part[0]) for part in parts]), masks[0] if masks else None

    def _rows(self) -> Iterator[list[np.ndarray]]:
        with open_file(self.path) as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                row = _parsed(self.path, number, line)
                values = [_integers(self.path, number, row, key) for key in self.keys]
                if len(values) == 2 and len(values[0]) != len(values[1]):
                    raise JobError(f"{self.path}:{number}: the mask has another length than the ids")
                yield values


@frozen(kw_only=True)
class JsonLines(ColumnFormat):
    """JSON lines with a field of ids."""

    def suffixes(self) -> tuple[str, ...]:
        """Of JSON lines."""
        return (".jsonl",)

    def is_file(self, file: Candidate) -> bool:
        """By the name, and an object in its first line."""
        return file.path.endswith(".jsonl") and file.head.lstrip().startswith(b"{")

    def columns(self, file: Candidate) -> dict[str, bool]:
        """By the first line."""
        with open_file(file.path) as lines:
            row = _parsed(file.path, 1, lines.readline())
        return {key: isinstance(value, list) and {*map(type, value)} <= {int, bool} for key, value in row.items()}

    def documents(self, file: Candidate) -> JsonDocuments:
        """The lines."""
        with open_file(file.path) as lines:
            lines.seek(max(0, file.size - TAIL))
            tail = lines.read()
        # A line is whole if it ends, or if it is JSON: the last one may lack its line break
        last = tail.rpartition(b"\n")[2]
        if last.strip() and (b"\n" in tail or len(tail) == file.size):
            _parsed(file.path, -1, last)
        return JsonDocuments(file.absolute, (self.column, *([self.mask_column] if self.mask_column else [])))


def _parsed(path: str, number: int, line: bytes) -> dict[str, Any]:
    """The object in a line; -1 is the last line."""
    where = f"{path}:{number}" if number > 0 else f"{path}: the last line"
    try:
        row = json.loads(line)
    except ValueError as error:
        raise JobError(f"{where} is not JSON ({error}): it was cut short, or is damaged") from error
    if not isinstance(row, dict):
        raise JobError(f"{where} is no object")
    return row


def _integers(path: str, number: int, row: dict[str, Any], key: str) -> np.ndarray:
    import numpy as np

    values = row.get(key)
    # An empty list has no type: numpy would call it float
    array = np.asarray(values if values else [], dtype=None if values else np.int64)
    if not isinstance(values, list) or array.dtype.kind not in "iub" or array.ndim != 1:
        raise JobError(f"{path}:{number}: {key!r} is not a list of integers")
    return array
