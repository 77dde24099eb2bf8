"""A logger that writes a table."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Table:
    """See `forge_core.contracts.runtime.Logger`."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self._path, self._columns = path, ["step", *columns]

    def start(self, step: int) -> None:
        """Drop rows after `step`: a run that was killed logs the steps after its checkpoint again."""
        kept = [row for row in self._rows() if int(row["step"]) <= step]
        self._file = self._path.open("w", newline="", buffering=1)
        self._writer = csv.DictWriter(self._file, self._columns, extrasaction="ignore", lineterminator="\n")
        self._writer.writeheader()
        self._writer.writerows(kept)

    def log(self, record: Mapping[str, Any]) -> None:
        """Append a line for a step that has any of the columns."""
        if any(column in record for column in self._columns[1:]):
            self._writer.writerow(record)

    def close(self) -> None:
        self._file.close()

    def _rows(self) -> list[dict[str, str]]:
        """Returns the rows of an earlier start, without one that was truncated when it was killed."""
        if not self._path.exists():
            return []
        whole = [line for line in self._path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [row for row in csv.DictReader(whole) if row.get("step", "").isdigit()]
