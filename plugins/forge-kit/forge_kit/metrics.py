"""Metrics of a run, read from its folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_core.checkpoint.run_folder import RunFolder
from forge_core.contracts.errors import ForgeError

NOT_FINITE = ("nan", "inf", "-inf")


class Metrics(list[dict[str, Any]]):
    """A row of metrics for each step that was logged: `pandas.DataFrame(metrics)`."""

    evaluations: list[dict[str, Any]]
    """A row for each evaluation, with its `step`."""


def read_metrics(path: Path | str) -> Metrics:
    """Read the metrics of a run, finished or not, each step once.

    Args:
        path: the run folder, of which the file is meant that its logger `jsonl` writes; or a file.

    Raises:
        ForgeError: there is no such file.
    """
    file = RunFolder(Path(path)).metrics_file() if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise ForgeError(f"{file} does not exist; give a run folder, or the file that the run writes")
    tables: tuple[dict[int, dict[str, Any]], ...] = ({}, {})
    with file.open(encoding="utf-8", newline="\n") as lines:
        for line in lines:
            if record := _parse(line):
                rows = tables["loss" not in record]
                rows[record["step"]] = rows.get(record["step"], {}) | _row(record)
    metrics = Metrics(tables[0].values())
    metrics.evaluations = [*tables[1].values()]
    return metrics


def _row(record: Mapping[str, Any]) -> dict[str, Any]:
    # One string for a name in all rows: json makes one for each line, which is most of the memory of a row
    return {sys.intern(name): float(value) if value in NOT_FINITE else value for name, value in record.items()}


def _parse(line: str) -> dict[str, Any] | None:
    try:
        return json.loads(line) if line.endswith("\n") else None  # a run that was killed may end within a line
    except ValueError:
        return None
