"""Curves in braille: two by four dots a character."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a character, by row and column of its dots."""


def visible_range(values: Sequence[float]) -> tuple[float, float]:
    """Returns the values between which a curve is drawn: all, unless single ones would flatten the others."""
    finite = sorted(value for value in values if math.isfinite(value))
    if not finite:
        return 0.0, 1.0
    low, high = finite[0], finite[-1]
    # With fewer points, each of them is of interest
    if len(finite) >= 50:
        size = max(8, len(values) // 100)
        parts = (values[at : at + size] for at in range(0, len(values), size))
        medians = [median(part) for values_ in parts if (part := [v for v in values_ if math.isfinite(v)])]
        # Medians too, so that a fall at the start, which is no outlier, stays in view
        calm_low = min(*medians, finite[len(finite) // 100])
        calm_high = max(*medians, finite[-1 - len(finite) // 100])
        reach = calm_high - calm_low
        low = low if low >= calm_low - reach else calm_low
        high = high if high <= calm_high + reach else calm_high
    # Values that are all equal lie in the middle of a range around them
    return (low, high) if high > low else (low - (abs(low) or 1) / 20, high + (abs(high) or 1) / 20)


def curve(x: Sequence[float], y: Sequence[float], width: int, height: int) -> tuple[list[str], tuple[float, float]]:
    """Draws a curve: from the least to the largest value of each column of dots, so that spikes are seen.

    Args:
        x: places in order.
        y: values; those that are not finite leave a gap.
        width: characters of a line.
        height: lines.

    Returns:
        the lines from top to bottom, and the values at their lower and upper end.
    """
    low, high = visible_range(y)
    across, down = 2 * width, 4 * height
    columns: dict[int, list[float]] = {}
    reach = (x[-1] - x[0]) if len(x) > 1 else 0.0
    for place, value in zip(x, y, strict=True):
        if math.isfinite(value):
            column = round((across - 1) * (place - x[0]) / reach) if reach else 0
            # Values outside the visible range are drawn at its edge
            columns.setdefault(column, []).append(min(high, max(low, value)))
    cells = [[0] * width for _ in range(height)]
    before: tuple[int, int] | None = None
    for column in sorted(columns):
        rows = [round((down - 1) * (high - value) / (high - low)) for value in columns[column]]
        if before is not None:
            _join(cells, before[0], before[1], column, rows[0])
        for row in range(min(rows), max(rows) + 1):
            _dot(cells, column, row)
        # In order of arrival: a line joins the last value of a column and the first of the next
        before = column, rows[-1]
    return ["".join(chr(0x2800 + cell) for cell in line) for line in cells], (low, high)


def _join(cells: list[list[int]], left: int, from_row: int, right: int, to_row: int) -> None:
    """A straight line between two columns, as evaluations have few points."""
    steps = max(right - left, abs(to_row - from_row), 1)
    for step in range(1, steps):
        _dot(cells, left + round(step * (right - left) / steps), from_row + round(step * (to_row - from_row) / steps))


def _dot(cells: list[list[int]], column: int, row: int) -> None:
    cells[row // 4][column // 2] |= DOTS[row % 4][column % 2]
