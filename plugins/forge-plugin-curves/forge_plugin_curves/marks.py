"""How series look on a panel: lines, points, and the part of the y-axis that is shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

from forge_plugin_curves.history import Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TRAINING, HELD_OUT, TROUBLE, SOFT = "#2f6fb3", "#d9622b", "#c1121f", "#6b7480"
COLUMNS = 800
"""Columns into which long series are gathered: about as many as a panel has pixels."""
CROWD = 40
"""Points from which on they are drawn small."""
WIDE = 30.0
"""Ratio of the largest to the smallest value from which on an axis is logarithmic."""
ROUGH = (0.01, 0.99)
"""Quantiles of a rough series that must be in view: a single spike would press the rest flat."""


def line(axes: Axes, series: Series, *, faint: bool = False, label: str = "") -> None:
    """The series as a line: strong, or faint where it is the background of a smooth one."""
    width, alpha = (0.8, 0.35) if faint else (1.8, 1.0)
    axes.plot(*envelope(series), color=TRAINING, linewidth=width, alpha=alpha, label=label or "_")


def points(axes: Axes, series: Series, *, label: str = "") -> None:
    """The series as joined points, with the last value written beside its point."""
    size = 6.0 if len(series) < CROWD else 3.0
    look: dict[str, Any] = {"marker": "o", "markersize": size, "markeredgecolor": "white", "markeredgewidth": 0.8}
    x, y = _arrays(series)
    axes.plot(x, y, color=HELD_OUT, linewidth=1.4, clip_on=False, zorder=3, label=label or "_", **look)
    if np.isfinite(y[-1]):
        beside(axes, x[-1], y[-1], f"{y[-1]:.4g}", color=HELD_OUT, fontweight="bold")


def beside(axes: Axes, x: float, y: float, text: str, **look: Any) -> None:
    """Text to the right of a place."""
    axes.annotate(text, (x, y), (7, 0), textcoords="offset points", va="center", annotation_clip=False, **look)


def broken(axes: Axes, series: Series) -> None:
    """A cross at the bottom for each value that is not finite: lines merely have a gap there."""
    x, y = _arrays(series)
    x = x[~np.isfinite(y)]
    if len(x):
        look = {"color": TROUBLE, "markersize": 5, "zorder": 4, "label": f"not finite ({len(x):,})"}
        axes.plot(x, np.full(len(x), 0.02), "x", transform=axes.get_xaxis_transform(), **look)


def envelope(series: Series, columns: int = COLUMNS) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values to draw: of a long series the least and the greatest of each column, so that spikes stay."""
    x, y = _arrays(series)
    if len(x) <= 2 * columns:
        return x, y
    starts = np.arange(0, len(x), -(-len(x) // columns))
    ends = np.stack([np.fmin.reduceat(y, starts), np.fmax.reduceat(y, starts)], axis=1)
    return np.repeat(x[starts], 2), ends.ravel()


def show_range(axes: Axes, *smooth: Series, rough: Series | None = None, wide_is_log: bool = False) -> None:
    """Choose the part of the y-axis that is shown: all of the `smooth` series, and most of the `rough` one."""
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
        axes.set_ylim(low / 1.3, high * 1.3)
    else:
        margin = 0.07 * (high - low) or 0.1 * abs(high) or 1.0
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=(1, 2, 2.5, 5, 10)))
        axes.set_ylim(low - margin, high + margin)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


def _arrays(series: Series) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values, NaN where not finite. Copies: a series cannot grow while its memory is lent."""
    steps, values = np.array(series.steps, dtype=float), np.array(series.values)
    return steps, np.where(np.isfinite(values), values, np.nan)


def _finite(series: Series) -> np.ndarray:
    values = np.array(series.values)
    return values[np.isfinite(values)]
