"""The component `csv`."""

from __future__ import annotations

import csv
import io
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from forge_core.contracts.components import LoggerComponent
from forge_core.files import write_atomically

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext


@frozen(kw_only=True)
class Csv(LoggerComponent):
    """Writes one table of comma-separated values (RFC 4180, UTF-8): a row for each line of metrics, a column a number.

    Rows of evaluations have no `loss`; a cell without a number is empty. Numbers that are not finite are `nan`, `inf`
    and `-inf`. A column that appears later is added to the whole table, with empty cells in the rows so far. Counts of
    modules, which are lists, are left out. A row is with the system at once, and on disk before each checkpoint.
    """

    file: str = "metrics.csv"
    """Relative to the run folder."""

    def build(self, context: BuildContext) -> CsvLogger:
        assert context.folder is not None
        return CsvLogger(context.folder / self.file)


class CsvLogger:
    """See `forge_core.contracts.runtime.Logger`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: io.FileIO | None = None

    def start(self, step: int) -> None:
        """Keep the rows up to `step`, all of them with a cell for each column; an incomplete last row is dropped."""
        self._columns, self._waiting = ["step"], list[Mapping[str, Any]]()
        rows = list(self._rows()) if step else []
        if rows:
            self._columns = rows[0]
        self._rewrite(row for row in rows[1:] if int(row[self._columns.index("step")]) <= step)

    def log(self, record: Mapping[str, Any]) -> None:
        """Append a row. One that cannot be written (the disk is full, say) is written with a later one."""
        self._waiting.append({name: value for name, value in record.items() if not isinstance(value, Mapping | list)})
        self._write()

    def flush(self) -> None:
        self._write()
        os.fsync(self._open_file.fileno())  # a run that continues from the checkpoint does not log these steps again

    def close(self) -> None:
        try:
            self._write()
        except OSError as error:
            warnings.warn(f"{error}: {len(self._waiting)} rows of {self._path} are lost", stacklevel=2)
        self._open_file.close()

    @property
    def _open_file(self) -> io.FileIO:
        assert self._file is not None, "started"
        return self._file

    def _write(self) -> None:
        if new := [name for name in dict.fromkeys(name for row in self._waiting for name in row) if self._is_new(name)]:
            rows = list(self._rows())[1:]
            before, self._columns = self._columns, [*self._columns, *new]
            try:
                self._rewrite([*row, *[""] * len(new)] for row in rows)
            except OSError:
                self._columns = before  # the table has its old header still
                raise
        while self._waiting:
            row = self._waiting[0]
            self._append(_text([row.get(name, "") for name in self._columns]).encode())
            self._waiting.pop(0)

    def _is_new(self, name: str) -> bool:
        return name not in self._columns

    def _append(self, text: bytes) -> None:
        """Append a whole row or nothing: half of one, on a disk that is nearly full, would join the next."""
        file = self._open_file
        end = file.seek(0, os.SEEK_END)
        try:
            if file.write(text) < len(text):
                raise OSError(f"no room for a row in {self._path}")
        except OSError:
            file.truncate(end)
            raise

    def _rows(self) -> Iterator[list[str]]:
        """Header and complete rows of the table as it is."""
        if not self._path.exists():
            return
        text = self._path.read_bytes().decode()  # not as text, which would change line ends inside of cells
        yield from csv.reader(io.StringIO(text[: text.rfind("\n") + 1], newline=""))

    def _rewrite(self, rows: Iterable[list[str]]) -> None:
        # A process that is killed here loses no row
        write_atomically(self._path, "".join(map(_text, [self._columns, *rows])))
        if self._file is not None:
            self._file.close()
        self._file = self._path.open("ab", buffering=0)


def _text(cells: Iterable[Any]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue()
