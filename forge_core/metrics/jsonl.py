"""Metrics as JSON lines."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from forge_core.components import LoggerComponent

if TYPE_CHECKING:
    from forge_core.context import BuildContext


@frozen(kw_only=True)
class JsonLines(LoggerComponent):
    """One line of JSON a record, flushed at once. Numbers that are not finite become strings ("nan", "inf")."""

    file: str = "metrics.jsonl"
    """Relative to the run folder."""

    def build(self, context: BuildContext) -> JsonLinesLogger:
        assert context.folder is not None
        return JsonLinesLogger(context.folder / self.file)


class JsonLinesLogger:
    """See `forge_core.protocols.Logger`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def start(self, step: int) -> None:
        """Keep the lines up to `step`: a continued run has no step twice and no gap. A torn last line is dropped."""
        kept = [line for line in self._lines() if (record := _parse(line)) and record["step"] <= step]
        self._path.write_text("".join(kept))
        self._file = self._path.open("a")

    def log(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps({name: _finite(value) for name, value in record.items()}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _lines(self) -> list[str]:
        return self._path.read_text().splitlines(keepends=True) if self._path.exists() else []


def _parse(line: str) -> dict[str, Any] | None:
    try:
        return json.loads(line) if line.endswith("\n") else None
    except ValueError:
        return None


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
