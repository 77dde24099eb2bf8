"""Tables of text, for commands."""

from __future__ import annotations

from collections.abc import Sequence


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows with aligned columns; the last column is as wide as it needs."""
    widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    lines = ("".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
