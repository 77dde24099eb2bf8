"""Four panels in one picture, through matplotlib's objects: pyplot would keep figures and look for a display."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from forge_plugin_curves.history import History, Series


@contextmanager
def _quiet() -> Iterator[None]:
    """matplotlib tells of its caches as if they were problems."""
    logger = logging.getLogger("matplotlib")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


with _quiet():
    from matplotlib import style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator

    from forge_plugin_curves import marks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, SOFT = "#22272e", marks.SOFT
STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#b4bcc6",
    "axes.grid": True,
    "axes.labelcolor": SOFT,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.color": "#e4e8ed",
    "legend.edgecolor": "none",
    "legend.fontsize": 9,
    "text.color": INK,
    "xtick.color": SOFT,
    "xtick.major.size": 0,
    "ytick.color": SOFT,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
}


def draw(history: History, path: Path, *, title: str, total_steps: int, clip_norm: float) -> None:
    """Write `make_figure` as PNG."""
    with _quiet(), style.context(["default", STYLE]):
        make_figure(history, title=title, total_steps=total_steps, clip_norm=clip_norm).savefig(path, format="png")


def make_figure(history: History, *, title: str, total_steps: int, clip_norm: float) -> Figure:
    """The picture of a run.

    Args:
        title: name of the run.
        total_steps: length of the whole run.
        clip_norm: norm down to which larger gradients are scaled; 0: never.
    """
    with _quiet(), style.context(["default", STYLE]):
        figure = Figure(figsize=(13, 8), dpi=120)
        FigureCanvasAgg(figure)
        figure.set_layout_engine("constrained", rect=(0.005, 0.005, 0.99, 0.925), wspace=0.04, hspace=0.08)
        panels = figure.subplots(2, 2, sharex=True)
        (loss, held_out), (rate, norm) = panels
        _heading(figure, history, title, total_steps)
        _loss(loss, history)
        _held_out(held_out, history)
        _learning_rate(rate, history)
        _gradient_norm(norm, history, clip_norm)
        for axes in panels[1]:
            _steps(axes, history)
        return figure


def _heading(figure: Figure, history: History, title: str, total_steps: int) -> None:
    progress = f"step {history.step:,} of {total_steps:,}"
    if history.tokens:
        progress += f"  ·  {EngFormatter(places=1, sep='')(history.tokens)} tokens"
    figure.text(0.012, 0.962, title, fontsize=17, fontweight="bold", va="center")
    figure.text(0.988, 0.962, progress, fontsize=11, color=SOFT, va="center", ha="right")


def _loss(axes: Axes, history: History) -> None:
    _title(axes, "Loss", "nats per token")
    _rough_and_smooth(axes, history.loss, history.smooth_loss, history.horizon)
    held_out = history.evaluations.get("loss", Series())
    if len(held_out):
        marks.points(axes, held_out, label="held out")
    marks.broken(axes, history.loss)
    marks.show_range(axes, history.smooth_loss, held_out, rough=history.loss)
    _legend(axes)


def _held_out(axes: Axes, history: History) -> None:
    name = "bits_per_byte" if "bits_per_byte" in history.evaluations else "perplexity"
    _title(axes, f"Held-out {name.replace('_', ' ')}")
    series = history.evaluations.get(name, Series())
    if len(series):
        marks.points(axes, series)
        marks.show_range(axes, series, wide_is_log=True)
    else:
        axes.text(0.5, 0.5, "no evaluation yet", transform=axes.transAxes, ha="center", color=SOFT)
        axes.set_yticks([])


def _learning_rate(axes: Axes, history: History) -> None:
    _title(axes, "Learning rate")
    marks.line(axes, history.lr)
    marks.show_range(axes, history.lr)
    axes.set_ylim(bottom=0.0)


def _gradient_norm(axes: Axes, history: History, clip_norm: float) -> None:
    _title(axes, "Gradient norm", "before clipping")
    _rough_and_smooth(axes, history.grad_norm, history.smooth_grad_norm, history.horizon)
    marks.broken(axes, history.grad_norm)
    marks.show_range(axes, history.smooth_grad_norm, rough=history.grad_norm, wide_is_log=True)
    low, high = axes.get_ylim()
    if clip_norm and low < clip_norm < high:
        axes.axhline(clip_norm, color=SOFT, linewidth=1, linestyle=(0, (5, 4)), label=f"clipped to {clip_norm:g}")
    _legend(axes)


def _rough_and_smooth(axes: Axes, rough: Series, smooth: Series, horizon: int) -> None:
    marks.line(axes, rough, faint=horizon > 1, label="each step")
    if horizon > 1:
        marks.line(axes, smooth, label=f"mean of about {horizon:,} steps")


def _title(axes: Axes, name: str, unit: str = "") -> None:
    axes.set_title(name, loc="left", fontsize=12, fontweight="bold", pad=9)
    axes.set_title(unit, loc="right", fontsize=10, color=SOFT, pad=9)


def _legend(axes: Axes) -> None:
    legend = axes.legend(loc="upper right")
    for handle in legend.get_lines():
        handle.set_alpha(max(handle.get_alpha() or 1.0, 0.5))


def _steps(axes: Axes, history: History) -> None:
    axes.set_xlabel("step")
    axes.set_xlim(0, max(history.step, 1) * 1.01)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=(1, 2, 2.5, 5, 10), integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
