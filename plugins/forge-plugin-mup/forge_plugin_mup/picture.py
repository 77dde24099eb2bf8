"""The picture of a coordinate check: a line for each quantity or role, against width and depth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.ticker import NullFormatter, ScalarFormatter

from forge_kit.tools.pictures import quiet_style, write_figure
from forge_plugin_mup.coordinates import CHANGE, START, UPDATE, Trend

COLORS = ("#2563eb", "#e8590c", "#0f9d76", "#7c4dbd", "#b8860b", "#c2255c")
TITLES = {
    START: "Root mean square at the start",
    CHANGE: "Root mean square of the change",
    UPDATE: "Last update over weights",
}


def draw(trends: Sequence[Trend], path: Path) -> None:
    """Write a picture, of the format that the suffix names: a row for each axis, a column for each of `TITLES`."""
    from matplotlib.figure import Figure

    axes = list(dict.fromkeys(trend.axis for trend in trends))
    with quiet_style():
        figure = Figure(figsize=(13, 3.4 * len(axes)), layout="constrained")
        for row, plots in zip(axes, figure.subplots(len(axes), len(TITLES), squeeze=False), strict=True):
            for what, plot in zip(TITLES, plots, strict=True):
                own = [trend for trend in trends if trend.axis == row and trend.what == what]
                for trend, color in zip(own, COLORS, strict=False):
                    plot.plot(trend.factors, trend.values, "o-", color=color, markersize=4, label=trend.quantity)
                # Both logarithmic, so that a power law is a straight line
                plot.set_xscale("log", base=2)
                plot.set_yscale("log")
                # The sizes that were trained, and not powers of ten between them
                plot.set_xticks(own[0].factors)
                plot.xaxis.set_major_formatter(ScalarFormatter())
                plot.xaxis.set_minor_formatter(NullFormatter())
                plot.set_xlabel(f"{row}, relative to the base")
                plot.set_title(TITLES[what])
                plot.legend(fontsize=7)
        write_figure(figure, path, path.suffix.lower().removeprefix("."))
