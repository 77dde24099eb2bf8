"""Metrics as JSON lines."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from math import inf, isfinite
from pathlib import Path
from typing import Any

from attrs import frozen

from forge_core.contracts.components import LoggerComponent
from forge_core.contracts.contexts import BuildContext
from forge_core.files import lines_from_end
from forge_core.job import METRICS


@frozen(kw_only=True)
class JsonLines(LoggerComponent):
    """One line of JSON a record, flushed at once. Numbers that are not finite become strings ("nan", "inf")."""

    file: str = METRICS
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
        # Unbuffered: a line is with the system once `log` returns, and survives a kill of this process.
        self._file = self._path.open("ab", buffering=0)
        self._file.truncate(self._end_of(step) if step else 0)
        self._unwritten = b""

    def _end_of(self, step: int) -> int:
        """Where the last line up to `step` ends. Sought from the end, as a long run has millions of lines."""
        with self._path.open("rb") as file:
            lines = lines_from_end(file)
            next(lines)  # incomplete
            return next((start + len(line) + 1 for start, line in lines if _step_of(line) <= step), 0)

    def log(self, record: Mapping[str, Any]) -> None:
        """Append a line. One that cannot be written (the disk is full, say) is written with a later one."""
        # json would write NaN and Infinity, which are no JSON, and which other languages refuse.
        odd = {name: str(value) for name, value in record.items() if isinstance(value, float) and not isfinite(value)}
        self._unwritten += f"{json.dumps({**record, **odd})}\n".encode()
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


def _step_of(line: bytes) -> float:
    """The step of a line; infinite if it is damaged."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, LookupError, TypeError):
        return inf
