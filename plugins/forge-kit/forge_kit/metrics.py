"""Metrics of a run, read from its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forge_core.contracts.errors import ForgeError
from forge_core.metrics.jsonl import LINES

NOT_FINITE = ("nan", "inf", "-inf")


class Metrics(list[dict[str, Any]]):
    """A row of metrics for each step that was logged: `pandas.DataFrame(metrics)`."""

    evaluations: list[dict[str, Any]]
    """A row for each evaluation, with its `step`."""


def read_metrics(path: Path | str) -> Metrics:
    """Read the metrics of a run, finished or not, each step once.

    Args:
        path: the run folder; or the file itself, where it has another name in `[loggers.jsonl]`.

    Raises:
        ForgeError: there is no such file.
    """
    file = Path(path) / LINES if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise ForgeError(f"{file} does not exist; give a run folder, or the file that [loggers.jsonl] names")
    tables: tuple[dict[int, dict[str, Any]], ...] = ({}, {})
    for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
        if record := _parse(line):
            row: dict[str, Any] = {key: float(value) if value in NOT_FINITE else value for key, value in record.items()}
            rows = tables["loss" not in row]
            rows[row["step"]] = rows.get(row["step"], {}) | row
    metrics = Metrics(tables[0].values())
    metrics.evaluations = [*tables[1].values()]
    return metrics


def _parse(line: str) -> dict[str, Any] | None:
    try:
        return json.loads(line) if line.endswith("\n") else None  # a run that was killed may end within a line
    except ValueError:
        return None
