"""Tables of text, for commands."""

from __future__ import annotations

from collections.abc import Sequence
from unicodedata import combining, east_asian_width


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows with aligned columns; the last column is as wide as it needs."""
    widths = [max(map(_width, column)) + 2 for column in zip(*rows, strict=True)]
    lines = (
        "".join(cell + " " * (width - _width(cell)) for cell, width in zip(row, widths, strict=True)) for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def _width(text: str) -> int:
    """Cells that a terminal takes for a text: two for Chinese, Japanese and Korean letters, and for emoji."""
    return sum(2 if east_asian_width(letter) in "WF" else not combining(letter) for letter in text)
