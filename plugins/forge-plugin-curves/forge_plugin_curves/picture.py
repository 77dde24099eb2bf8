"""Draws the curves of a run: four panels over the steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, NullFormatter

from forge_plugin_curves.history import History, Series

BLUE, ORANGE, GREEN, VIOLET, INK, GREY = "#2563eb", "#e8590c", "#0f9d76", "#7c4dbd", "#1f2933", "#7d8894"
PALE = {BLUE: "#c2d3fa", VIOLET: "#dccff0", GREEN: "#eaf6f2"}
"""Solid, not transparent: a transparent line of many points shows where Agg cut it into pieces."""
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": "#c9d0d8",
    "axes.labelcolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlepad": 10,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e9edf1",
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.solid_capstyle": "round",
    "agg.path.chunksize": 10_000,  # without it Agg gives up on lines of a million points
}


def draw(history: History, title: str, smoothing: float, path: Path) -> None:
    """Draw `history` to the PNG file `path`, which is replaced in one go, so that a viewer never sees half of it."""
    with mpl.rc_context(STYLE):
        layout = ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.12, hspace=0.06, wspace=0.04)
        figure = Figure(figsize=(12, 7.4), layout=layout)
        canvas = FigureCanvasAgg(figure)
        last_step = max([1, *history["loss"].steps[-1:], *history["eval/loss"].steps[-1:]])
        _header(figure, history, title, last_step)
        (loss, detail), (rate, norm) = figure.subplots(2, 2, sharex=True)
        _loss_panel(loss, history, smoothing)
        _detail_panel(detail, history)
        _rate_panel(rate, history)
        _norm_panel(norm, history, smoothing)
        _step_axis([rate, norm], last_step)
        unfinished = path.with_name(f".{path.name}.unfinished")
        canvas.print_figure(str(unfinished), format="png", dpi=140, facecolor="white")
    unfinished.replace(path)


def _header(figure: Figure, history: History, title: str, last_step: int) -> None:
    parts = [f"step {last_step:,}"]
    for name, text in (
        ("tokens", "{:,.0f} tokens"),
        ("loss", "loss {:.4f}"),
        ("eval/loss", "held-out loss {:.4f}"),
        ("eval/bits_per_byte", "{:.4f} bits per byte"),
    ):
        if len(history[name]):
            parts.append(text.format(history[name].values[-1]))
    figure.suptitle(f"{title}\n", x=0.012, ha="left", fontsize=16, fontweight="bold")
    figure.text(0.0125, 0.935, "   ·   ".join(parts), ha="left", va="center", fontsize=10.5, color=GREY)


def _loss_panel(axes: Axes, history: History, smoothing: float) -> None:
    axes.set_title("Loss", color=INK)
    axes.set_ylabel("nats per token")
    _measured_and_smoothed(axes, history["loss"], smoothing, BLUE, "training")
    held_out = history["eval/loss"]
    if len(held_out):
        _points(axes, held_out, ORANGE, "held out")
    if len(history["loss"]) or len(held_out):
        axes.legend(loc="upper right")


def _detail_panel(axes: Axes, history: History) -> None:
    """Held-out bits per byte; perplexity where the bytes of a token are not known."""
    for name, title, unit in (
        ("eval/bits_per_byte", "Held-out bits per byte", "bits per byte"),
        ("eval/perplexity", "Held-out perplexity", "perplexity"),
    ):
        if len(history[name]):
            axes.set_title(title, color=INK)
            axes.set_ylabel(unit)
            _points(axes, history[name], ORANGE, None)
            _logarithmic_if_wide(axes, history[name])
            return
    axes.set_title("Held-out bits per byte", color=INK)
    axes.text(0.5, 0.5, "no evaluation yet", transform=axes.transAxes, ha="center", color=GREY)
    axes.set_yticks([])


def _rate_panel(axes: Axes, history: History) -> None:
    axes.set_title("Learning rate", color=INK)
    series = history["lr"]
    axes.plot(series.steps, series.values, color=GREEN, linewidth=1.8)
    axes.fill_between(series.steps, series.values, color=PALE[GREEN], linewidth=0)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.yaxis.set_major_formatter(lambda rate, _: f"{rate:.3g}")


def _norm_panel(axes: Axes, history: History, smoothing: float) -> None:
    axes.set_title("Gradient norm, before clipping", color=INK)
    _measured_and_smoothed(axes, history["grad_norm"], smoothing, VIOLET, None)
    _logarithmic_if_wide(axes, history["grad_norm"])


def _logarithmic_if_wide(axes: Axes, series: Series) -> None:
    finite = [value for value in series.values if math.isfinite(value)]
    if finite and 0 < 10 * min(finite) < max(finite):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axes.yaxis.set_minor_formatter(NullFormatter())


def _measured_and_smoothed(axes: Axes, series: Series, smoothing: float, color: str, label: str | None) -> None:
    """The values pale, their means strong; or only the values, while there are few."""
    window = round(smoothing * len(series))
    if window < 2:
        marker = "o" if len(series) == 1 else None
        axes.plot(series.steps, series.values, color=color, linewidth=1.6, label=label, marker=marker, markersize=4)
        return
    axes.plot(series.steps, series.values, color=PALE[color], linewidth=0.9)
    axes.plot(series.steps, series.smoothed(window), color=color, linewidth=2, label=label)


def _points(axes: Axes, series: Series, color: str, label: str | None) -> None:
    """Marked points, the last of them with its value."""
    size = 5 if len(series) <= 40 else 2.5
    axes.plot(
        series.steps,
        series.values,
        color=color,
        linewidth=1.4,
        marker="o",
        markersize=size,
        markerfacecolor="white",
        markeredgewidth=1.4,
        label=label,
        zorder=3,
    )
    axes.annotate(
        f"{series.values[-1]:.4g}",
        (series.steps[-1], series.values[-1]),
        xytext=(0, 9),
        textcoords="offset points",
        ha="right",
        color=color,
        fontweight="bold",
    )


def _step_axis(bottom: Sequence[Axes], last_step: int) -> None:
    for axes in bottom:
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7, steps=[1, 2, 2.5, 5, 10]))
        axes.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")
        axes.set_xlim(0, 1.015 * last_step)
