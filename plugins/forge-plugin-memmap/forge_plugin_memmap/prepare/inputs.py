"""Which files are read, and how."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from forge_core.contracts.errors import JobError, Problem
from forge_plugin_memmap.paths import FoundFile, distinct, expand
from forge_plugin_memmap.prepare.lines import read_lines
from forge_plugin_memmap.prepare.reading import Input
from forge_plugin_memmap.prepare.rows import parquet_fault, read_rows
from forge_plugin_memmap.prepare.streams import COMPRESSIONS
from forge_plugin_memmap.prepare.texts import read_text

READERS = {".jsonl": read_lines, ".txt": read_text, ".md": read_text, ".py": read_text}
"""Formats that may be compressed."""
PARQUET = ".parquet"
SUFFIXES = (*READERS, *(format_ + suffix for format_ in READERS for suffix in COMPRESSIONS), PARQUET)


def find_inputs(patterns: Sequence[str], field: str, output: Path) -> list[Input]:
    """The files of the patterns, in the order of the patterns and, within each, of their names.

    Nothing that lies in the output folder is an input.

    Raises:
        JobError: a pattern leads to nothing, a file is of no known format, or a Parquet file has no such column.
    """
    problems: list[Problem] = []
    candidates: list[FoundFile] = []
    for pattern in patterns:
        try:
            candidates += expand(pattern, SUFFIXES)
        except JobError as error:
            problems += error.problems
    files = [file for file in distinct(candidates) if not _inside(file.path, output)]
    problems += [Problem("", fault) for file in files for fault in _faults(file.path, field)]
    if problems:
        raise JobError(problems)
    return [Input.of(file.path, _reader(file.path)) for file in files]


def _faults(path: str, field: str) -> Iterator[str]:
    if not path.endswith(SUFFIXES):
        formats = f"{', '.join(READERS)}, each also with {' or '.join(COMPRESSIONS)}, and {PARQUET}"
        yield f"{path}: the name tells no known format; there are {formats}"
    elif path.endswith(PARQUET) and (fault := parquet_fault(path, field)):
        yield fault


def _reader(path: str) -> Any:
    stem, suffix = os.path.splitext(path)
    return READERS.get(os.path.splitext(stem)[1] if suffix in COMPRESSIONS else suffix, read_rows)


def _inside(path: str, folder: Path) -> bool:
    return Path(os.path.abspath(path)).is_relative_to(os.path.abspath(folder))
