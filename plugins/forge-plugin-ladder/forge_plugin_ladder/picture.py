"""The picture of a ladder: IsoFLOP curves, residuals, and the frontier with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from forge_kit.tools.pictures import GREY, quiet_style, write_figure
from forge_plugin_ladder.intervals import Resampled
from forge_plugin_ladder.law import Sizes
from forge_plugin_ladder.parabolas import groups_of
from forge_plugin_ladder.points import Point
from forge_plugin_ladder.prediction import Cost, Prediction

COLORS = ("#2563eb", "#e8590c", "#0f9d76", "#7c4dbd", "#c1121f", "#0891b2", "#a16207", "#be185d")


def draw(
    resampled: Resampled, points: Sequence[Point], frontier: Sequence[Prediction], total: bool, path: Path
) -> None:
    """Write a PNG.

    Args:
        resampled: the fit.
        points: of the ladder.
        frontier: predictions by rising budget, some within the ladder and some beyond.
        total: parameters with embeddings.
        path: the file.
    """
    from matplotlib.figure import Figure

    with quiet_style():
        figure = Figure(figsize=(13, 4.6), layout="constrained")
        curves, left, ahead = figure.subplots(1, 3)
        _curves(curves, resampled, points, total)
        _residuals(left, resampled, points)
        _frontier(ahead, points, frontier)
        write_figure(figure, path, "png")


def _curves(axes: Axes, resampled: Resampled, points: Sequence[Point], total: bool) -> None:
    axes.set_title("Loss by size, one curve per budget")
    cost = Cost([point for point in points if point.usable], total)
    for number, group in enumerate(groups_of(points)):
        color = COLORS[number % len(COLORS)]
        n = np.array([point.parameters_total if total else point.parameters for point in group])
        axes.plot(n, [point.loss for point in group], "o", color=color, markersize=4, label=f"{group[0].flops:.2g}")
        # A little beyond the sizes on both sides
        across = np.geomspace(n.min() / 1.2, n.max() * 1.2, 50)
        flops = np.mean([point.flops for point in group])
        sizes = Sizes(parameters=across, tokens=flops / cost(across), unique_tokens=np.full(len(across), np.inf))
        axes.plot(across, resampled.fit.loss(sizes), color=color, linewidth=1.2)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel("parameters")
    axes.set_ylabel("nats per token")
    axes.legend(title="FLOPs", labelcolor=GREY, fontsize=7)


def _residuals(axes: Axes, resampled: Resampled, points: Sequence[Point]) -> None:
    axes.set_title("What the law leaves")
    usable = [point for point in points if point.usable]
    axes.plot([point.flops for point in usable], 100 * resampled.residuals, "o", color=COLORS[0], markersize=4)
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("FLOPs")
    axes.set_ylabel("measured above predicted, %")


def _frontier(axes: Axes, points: Sequence[Point], frontier: Sequence[Prediction]) -> None:
    axes.set_title("Best loss by budget, and its interval")
    usable = [point for point in points if point.usable]
    axes.plot([point.flops for point in usable], [point.loss for point in usable], "o", color=GREY, markersize=3)
    flops = [each.flops for each in frontier]
    axes.plot(flops, [each.loss for each in frontier], color=COLORS[0], linewidth=1.6)
    # Of one run: a point may lie outside of the law's own interval
    low, high = zip(*(each.run_interval for each in frontier), strict=True)
    axes.fill_between(flops, low, high, color=COLORS[0], alpha=0.2, linewidth=0)
    axes.set_xscale("log")
    axes.set_xlabel("FLOPs")
    axes.set_ylabel("nats per token")
