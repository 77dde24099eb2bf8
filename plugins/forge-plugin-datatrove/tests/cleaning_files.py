"""Files that the tests of `forge-run data filter` and its like write and read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

Command = Callable[..., Any]


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_table(folder: Path, text: str) -> None:
    """Writes `clean.toml`, which works in one process."""
    (folder / "clean.toml").write_text(f'inputs = ["in"]\noutput = "out"\nworkers = 1\n{text}')


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Returns all records of a folder of JSON lines, in the order of its files."""
    return [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
