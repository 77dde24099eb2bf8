"""Plain text in columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDTH = 100


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows with aligned columns; the last column is as wide as it needs."""
    if not rows:
        return ""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]) - 1)]
    padded = ([cell.ljust(width + 2) for cell, width in zip(row, widths, strict=False)] for row in rows)
    return "\n".join(("".join(cells) + row[-1]).rstrip() for cells, row in zip(padded, rows, strict=True))


def wrapped(text: str, indent: str = "") -> str:
    """A paragraph in lines of moderate width."""
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent)
