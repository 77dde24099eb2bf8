"""Draws four panels in one picture, by matplotlib's objects: pyplot would keep figures and search for a display."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from forge_kit.tools.pictures import GREY, quiet, quiet_style, write_figure
from forge_plugin_runs.curves.history import History, Series

with quiet():
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import EngFormatter, MaxNLocator, StrMethodFormatter

    from forge_plugin_runs.curves import marks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEADING_INCHES, MAP_INCHES, ROW_INCHES = 0.76, 1.2, 0.2


def draw(history: History, path: Path, *, title: str, total_steps: int, clip_norm: float) -> None:
    """Write `make_figure` to a PNG file, replaced atomically: a viewer never sees half of it."""
    with quiet_style():
        figure = make_figure(history, title=title, total_steps=total_steps, clip_norm=clip_norm)
        write_figure(figure, path, "png")


def make_figure(history: History, *, title: str, total_steps: int, clip_norm: float) -> Figure:
    """Draw the picture of a run.

    Args:
        history: series and counts of the run.
        title: name of the run.
        total_steps: length of the whole run.
        clip_norm: norm that larger gradients are scaled down to; 0: never.
    """
    with quiet_style():
        maps = _maps(history)
        heights = [4, 4, *(MAP_INCHES + ROW_INCHES * len(rows) for rows in maps.values())]
        # Sizes of the heading are in inches: maps make the picture higher, and no text larger
        figure = new_figure((13, sum(heights)), heading=HEADING_INCHES / sum(heights))
        _heading(figure, history, title, total_steps)
        grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
        loss, held_out, rate, norm = (figure.add_subplot(grid[place // 2, place % 2]) for place in range(4))
        _loss(loss, history)
        _held_out(held_out, history)
        _learning_rate(rate, history)
        _gradient_norm(norm, history, clip_norm)
        _step_axes([loss, held_out], [rate, norm], history.step)
        for number, (name, rows) in enumerate(maps.items(), 2):
            _heat_map(figure.add_subplot(grid[number, :]), name, rows)
        return figure


def new_figure(size: tuple[float, float], heading: float = 0.095) -> Figure:
    """Create an empty picture of a size in inches; `heading` is the share of its height left free at the top."""
    layout = ConstrainedLayoutEngine(rect=(0.005, 0.005, 0.99, 0.99 - heading), wspace=0.04, hspace=0.08)
    figure = Figure(figsize=size, dpi=120, layout=layout)
    # The canvas attaches itself to the figure; without one it cannot be laid out or saved
    FigureCanvasAgg(figure)
    return figure


def _heading(figure: Figure, history: History, title: str, total_steps: int) -> None:
    height = figure.get_figheight()
    figure.text(0.011, 1 - 0.264 / height, title, fontsize=17, fontweight="bold", va="center")
    facts = "   ·   ".join(_facts(history, total_steps))
    figure.text(0.0115, 1 - 0.56 / height, facts, fontsize=10.5, color=GREY, va="center")


def _facts(history: History, total_steps: int) -> Iterator[str]:
    yield f"step {history.step:,} of {total_steps:,}"
    if history.tokens:
        yield f"{EngFormatter(places=1, sep='')(history.tokens)} tokens"
    if len(history.loss):
        # Of the last step, as in the log and in `metrics.jsonl`; the strong line is an average, and is labelled so
        yield f"loss {history.loss.values[-1]:.4f}"
    for name, text in (("loss", "held-out loss {:.4f}"), ("bits_per_byte", "{:.4f} bits per byte")):
        if name in history.evaluations:
            yield text.format(history.evaluations[name].values[-1])


def _loss(axes: Axes, history: History) -> None:
    axes.set_title("Loss")
    axes.set_ylabel("nats per token")
    _rough_and_smooth(axes, history.loss, history.smooth_loss, history.horizon, marks.BLUE)
    held_out = history.evaluations.get("loss", Series())
    if len(held_out):
        marks.points(axes, held_out, label="held out")
    marks.broken(axes, history.loss)
    marks.show_range(axes, history.smooth_loss, held_out, rough=history.loss)
    axes.legend(loc="upper right")


def _held_out(axes: Axes, history: History) -> None:
    """Draw bits per byte; perplexity if the mean bytes of a token are not known; else what was evaluated first."""
    # Of a run that learns from rewards, evaluations have no loss
    named = (name for name in ("bits_per_byte", "perplexity", *history.evaluations) if name in history.evaluations)
    name = next(named, "perplexity")
    unit = name.replace("_", " ")
    axes.set_title(f"Held-out {unit}")
    axes.set_ylabel(unit)
    series = history.evaluations.get(name, Series())
    if len(series):
        marks.points(axes, series)
        marks.show_range(axes, series, wide_is_log=True)
    else:
        axes.text(0.5, 0.5, "no evaluation yet", transform=axes.transAxes, ha="center", color=GREY)
        axes.set_yticks([])


def _learning_rate(axes: Axes, history: History) -> None:
    axes.set_title("Learning rate")
    marks.filled(axes, history.lr, marks.GREEN)
    marks.show_range(axes, history.lr)
    # From 0 on: a decay to a tenth would otherwise look like one to nothing
    axes.set_ylim(bottom=0.0)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


def _gradient_norm(axes: Axes, history: History, clip_norm: float) -> None:
    axes.set_title("Gradient norm, before clipping")
    _rough_and_smooth(axes, history.grad_norm, history.smooth_grad_norm, history.horizon, marks.VIOLET)
    marks.broken(axes, history.grad_norm)
    marks.show_range(axes, history.smooth_grad_norm, rough=history.grad_norm, wide_is_log=True)
    low, high = axes.get_ylim()
    if clip_norm and low < clip_norm < high:
        axes.axhline(clip_norm, color=GREY, linewidth=1, linestyle=(0, (5, 4)), label=f"clipped to {clip_norm:g}")
    axes.legend(loc="upper right")


def _rough_and_smooth(axes: Axes, rough: Series, smooth: Series, horizon: int, color: str) -> None:
    marks.line(axes, rough, color, pale=horizon > 1, label="each step")
    if horizon > 1:
        marks.line(axes, smooth, color, label=f"mean of about {horizon:,} steps")


def _maps(history: History) -> Mapping[str, Mapping[str, np.ndarray]]:
    """Returns the counts of layers, by name and layer. Names with the same numbers share a map."""
    maps: list[tuple[list[str], Mapping[str, np.ndarray]]] = []
    for name, averages in history.counts.items():
        rows = {row: average.value for row, average in averages.items()}
        # Without a capacity, for example, load and choices of experts are equal, and one map is enough
        same = next((names for names, shown in maps if _equal(shown, rows)), None)
        if same is None:
            maps.append(([name], rows))
        else:
            same.append(name)
    return {", ".join(names): rows for names, rows in maps}


def _equal(rows: Mapping[str, np.ndarray], others: Mapping[str, np.ndarray]) -> bool:
    return rows.keys() == others.keys() and all(np.array_equal(rows[row], others[row]) for row in rows)


def _heat_map(axes: Axes, name: str, rows: Mapping[str, np.ndarray]) -> None:
    """Draw a row for each layer: counts relative to the layer's mean, signed numbers unchanged."""
    signed = any(values.min() < 0 for values in rows.values())
    if not signed:
        # A layer may have counted nothing
        rows = {row: values / max(values.mean(), 1e-30) for row, values in rows.items()}
    # Unsigned counts: white at the mean, and the darkest colour from twice the mean on
    low, high = (-largest, largest) if signed and (largest := max(abs(v).max() for v in rows.values())) else (0, 2)
    shown = np.full((len(rows), max(map(len, rows.values()))), np.nan)  # shorter rows end in nothing
    for place, values in enumerate(rows.values()):
        shown[place, : len(values)] = values
    axes.set_title(name if signed else f"{name}, relative to the mean of its layer")
    axes.set_ylabel("layer")
    axes.set_yticks(range(len(rows)), list(rows))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True))
    axes.grid(False)
    picture = axes.imshow(shown, cmap="RdBu_r", vmin=low, vmax=high, aspect="auto", interpolation="nearest")
    figure = axes.get_figure()
    assert figure is not None
    figure.colorbar(picture, ax=axes, extend="neither" if signed else "max", fraction=0.02, pad=0.01)


def _step_axes(top: Sequence[Axes], bottom: Sequence[Axes], last_step: int) -> None:
    for axes in (*top, *bottom):
        axes.tick_params(labelbottom=axes in bottom)
        axes.set_xlabel("step" if axes in bottom else "")
        # The same range in all panels, so that equal steps are below each other
        axes.set_xlim(0, max(last_step, 1) * 1.01)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=(1, 2, 2.5, 5, 10), integer=True))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
