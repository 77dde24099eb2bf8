"""Draws series on a panel: lines, points, crosses, and the visible part of the y-axis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

from forge_plugin_runs.curves.history import Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GREEN, VIOLET, RED = "#2563eb", "#e8590c", "#0f9d76", "#7c4dbd", "#c1121f"
PALE = {BLUE: "#c2d3fa", GREEN: "#eaf6f2", VIOLET: "#dccff0"}
"""Solid colours: transparent lines are darker where they cross themselves."""
COLUMNS = 800
"""Columns that long series are reduced to: about the pixels of a panel."""
CROWD = 40
"""Number of points from which they are drawn small."""
WIDE = 10.0
"""Ratio of the largest to the smallest value above which an axis is logarithmic."""
ROUGH = (0.01, 0.99)
"""Quantiles of a rough series that must be visible: with a single spike in view the rest would be flat."""


def line(axes: Axes, series: Series, color: str, *, pale: bool = False, label: str | None = None) -> None:
    """Draw the series as a line: strong, or pale as the background of a smooth one."""
    look: dict[str, Any] = {"color": PALE[color], "linewidth": 0.9} if pale else {"color": color, "linewidth": 1.8}
    look["marker"] = "o" if len(series) == 1 else None
    axes.plot(*envelope(series), label=label, markersize=4, **look)


def filled(axes: Axes, series: Series, color: str) -> None:
    """Draw the series as a line, with the area below it."""
    line(axes, series, color)
    axes.fill_between(*envelope(series), color=PALE[color], linewidth=0)


def points(axes: Axes, series: Series, *, label: str | None = None) -> None:
    """Draw the series as joined points, with the last value beside its point."""
    x, y = _arrays(series)
    look: dict[str, Any] = {"marker": "o", "markersize": 5 if len(x) < CROWD else 2.5, "markerfacecolor": "white"}
    axes.plot(x, y, color=ORANGE, linewidth=1.4, markeredgewidth=1.4, clip_on=False, zorder=3, label=label, **look)
    if np.isfinite(y[-1]):
        text, at = f"{y[-1]:.4g}", (x[-1], y[-1])
        look = {"va": "center", "color": ORANGE, "fontweight": "bold", "annotation_clip": False}
        axes.annotate(text, at, xytext=(7, 0), textcoords="offset points", **look)


def broken(axes: Axes, series: Series) -> None:
    """Draw a cross at the bottom for each value that is not finite: lines have only a gap there."""
    x, y = _arrays(series)
    # `_arrays` turns infinities into NaN, so that this finds both
    x = x[np.isnan(y)]
    if len(x):
        look: dict[str, Any] = {"color": RED, "markersize": 5, "zorder": 4, "label": f"not finite ({len(x):,})"}
        axes.plot(x, np.full(len(x), 0.02), "x", transform=axes.get_xaxis_transform(), **look)


def envelope(series: Series, columns: int = COLUMNS) -> tuple[np.ndarray, np.ndarray]:
    """Returns steps and values to draw: of a long series the extremes of each column, so that spikes stay visible."""
    x, y = _arrays(series)
    if len(x) <= 2 * columns:
        return x, y
    starts = np.arange(0, len(x), -(-len(x) // columns))
    # fmin and fmax ignore NaN unless a column has nothing else
    ends = np.stack([np.fmin.reduceat(y, starts), np.fmax.reduceat(y, starts)], axis=1)
    return np.repeat(x[starts], 2), ends.ravel()


def show_range(axes: Axes, *smooth: Series, rough: Series | None = None, wide_is_log: bool = False) -> None:
    """Set the visible part of the y-axis: all of the `smooth` series, and most of the `rough` one."""
    parts = [_finite(series) for series in smooth]
    if rough is not None and len(values := _finite(rough)):
        parts.append(np.quantile(values, ROUGH))
    values = np.concatenate(parts)
    if not len(values):
        return
    low, high = float(values.min()), float(values.max())
    if wide_is_log and low > 0 and high / low > WIDE:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        axes.set_ylim(low / 1.3, high * 1.3)
    else:
        # A constant series has no extent: then a share of its value, and 1 for zeros
        margin = 0.07 * (high - low) or 0.1 * abs(high) or 1.0
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=(1, 2, 2.5, 5, 10)))
        axes.ticklabel_format(axis="y", style="plain", useOffset=False)
        axes.set_ylim(low - margin, high + margin)


def _arrays(series: Series) -> tuple[np.ndarray, np.ndarray]:
    """Returns steps and values, NaN where not finite, as copies: an array cannot grow while numpy views its memory."""
    steps, values = np.array(series.steps, dtype=float), np.array(series.values)
    return steps, np.where(np.isfinite(values), values, np.nan)


def _finite(series: Series) -> np.ndarray:
    values = np.array(series.values)
    return values[np.isfinite(values)]
