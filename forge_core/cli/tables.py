"""Plain text in columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDTH = 100


def columns(rows: Sequence[Sequence[str]], gap: int = 2) -> str:
    """Rows with aligned columns; the last column is as wide as it needs."""
    if not rows:
        return ""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]) - 1)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width + gap) for cell, width in zip(row[:-1], widths, strict=True)]
        lines.append(("".join(cells) + row[-1]).rstrip())
    return "\n".join(lines)


def wrapped(text: str, indent: str = "") -> str:
    """A paragraph in lines of moderate width."""
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent)
