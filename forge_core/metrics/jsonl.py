"""Metrics as JSON lines."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from forge_core.contracts.components import LoggerComponent

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext


LINES = "metrics.jsonl"
"""Name of the file in the run folder."""


@frozen(kw_only=True)
class JsonLines(LoggerComponent):
    """One line of JSON a record, flushed at once. Numbers that are not finite become strings ("nan", "inf")."""

    file: str = LINES
    """Relative to the run folder."""

    def build(self, context: BuildContext) -> JsonLinesLogger:
        assert context.folder is not None
        return JsonLinesLogger(context.folder / self.file)


class JsonLinesLogger:
    """See `forge_core.contracts.runtime.Logger`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def start(self, step: int) -> None:
        """Keep the lines up to `step`, so that a resumed run has no step twice. An incomplete last line is dropped."""
        lines = self._path.read_text().splitlines(keepends=True) if self._path.exists() else []
        current = [line for line in lines if step and (record := _parse(line)) and record["step"] <= step]
        unfinished = self._path.with_name(f".{self._path.name}.unfinished")
        unfinished.write_text("".join(current))
        os.replace(unfinished, self._path)  # atomic: a process that is killed here loses no line
        # Unbuffered: a line is with the system once `log` returns, and survives a kill of this process.
        self._file = self._path.open("ab", buffering=0)
        self._unwritten = b""

    def log(self, record: Mapping[str, Any]) -> None:
        """Append a line. One that cannot be written (the disk is full, say) is written with a later one."""
        self._unwritten += (json.dumps({name: _finite(value) for name, value in record.items()}) + "\n").encode()
        self._write()

    def flush(self) -> None:
        self._write()
        # A checkpoint must not outlive the lines before it: a run that continues from it would not log them again.
        os.fsync(self._file.fileno())

    def close(self) -> None:
        try:
            self._write()
        except OSError as error:
            warnings.warn(f"{error}: {self._unwritten.count(10)} lines of metrics are lost", stacklevel=2)
        self._file.close()

    def _write(self) -> None:
        try:
            while self._unwritten:  # a disk that is nearly full takes a part of a line
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            error.filename = str(self._path)  # writing to an open file leaves it out of the message
            raise


def _parse(line: str) -> dict[str, Any] | None:
    try:
        return json.loads(line) if line.endswith("\n") else None
    except ValueError:
        return None


def _finite(value: Any) -> Any:
    # json would write NaN and Infinity, which are no JSON, and which other languages refuse.
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
