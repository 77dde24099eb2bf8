"""Numbers as people read them, and tables that fit into a terminal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence

from forge_kit.tools.tables import columns

NEVER = 10**6
"""Columns of an output that is no terminal: nothing is left out of it."""


def size_text(count: int) -> str:
    """Returns bytes in a unit: `12.5 MB`."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"


def count_text(count: int | None) -> str:
    """Returns a number of tokens in a unit: `1.2 M`."""
    if count is None:
        return ""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return str(count)


def age_text(seconds: float) -> str:
    """Returns how long ago something was: `3 min`."""
    for unit, scale in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= scale:
            return f"{int(seconds // scale)} {unit}"
    return f"{max(0, int(seconds))} s"


def width() -> int:
    """Returns the columns of the terminal; of a file or pipe, more than any line has."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else NEVER


def fitted(rows: Sequence[Sequence[str]], expendable: Sequence[int], limit: int) -> list[str]:
    """Returns the lines of a table, without so many of the `expendable` columns that they fit into `limit` columns.

    Args:
        rows: cells; the first row has the titles.
        expendable: numbers of columns that may be left out, the first to go first.
        limit: width of the terminal. Lines that are too wide even without these columns are wrapped by the terminal.
    """
    left = list(range(len(rows[0])))
    waiting = list(expendable)
    while True:
        lines = columns([[row[number] for number in left] for row in rows]).split("\n")
        if not waiting or max(map(len, lines)) <= limit:
            return lines
        left.remove(waiting.pop(0))
