"""The time line of a run as a picture, by matplotlib's objects: pyplot would look for a display."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import EngFormatter, MaxNLocator

from forge_kit.tools.pictures import GREY, INK, quiet_style, write_figure
from forge_plugin_resilience.goodput.accounting import CLASSES, Account, Stretch
from forge_plugin_resilience.goodput.words import count, duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAPER = "#ffffff"
GROUPS = {
    "productive": ("productive", "#2563eb", ("productive",)),
    "lost": ("made again or undone", "#c1121f", ("made_again", "undone")),
    "save": ("saves", "#0f9d76", ("save",)),
    "evaluation": ("evaluations", "#7c4dbd", ("evaluation",)),
    "start": ("starting", "#e8a33d", ("initialisation", "preparation", "restore", "first_step")),
    "wait": ("data, hooks, other", "#7fb2f0", ("data", "hooks", "other", "open")),
    "down": ("nothing ran", "#d5dae0", ("down", "queue", "silent")),
}
"""Classes as they are shown: name, colour, and which of the account they are."""
GROUP_OF = {name: group for group, (_, _, names) in GROUPS.items() for name in names}
UNITS = ((2 * 86400.0, 86400.0, "days"), (7200.0, 3600.0, "hours"), (120.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
"""From which lifetime on an axis is in which unit."""
assert GROUP_OF.keys() == CLASSES.keys()


def draw(account: Account, path: Path, title: str) -> None:
    """Write the picture of a run's time; the file is replaced when it is whole."""
    with quiet_style():
        write_figure(make_figure(account, title), path, path.suffix.lower().removeprefix("."))


def make_figure(account: Account, title: str) -> Figure:
    """Draw steps over time with saves and lost stretches, the starts as bars, and the shares of the classes."""
    with quiet_style():
        # The strip above the rectangle is for the heading, which the layout does not consider
        layout = ConstrainedLayoutEngine(rect=(0.005, 0.005, 0.99, 0.885), hspace=0.06)
        figure = Figure(figsize=(13, 7.2), dpi=120, layout=layout)
        FigureCanvasAgg(figure)  # attaches itself to the figure, as pyplot would do
        _heading(figure, account, title)
        grid = figure.add_gridspec(3, 1, height_ratios=(4.6, 1.0, 0.7))
        steps, bar, shares = (figure.add_subplot(grid[row, 0]) for row in range(3))
        unit, name = next((unit, name) for least, unit, name in UNITS if account.lifetime >= least)
        _steps(steps, account, unit)
        _bar(bar, account, unit, name)
        _shares(shares, account)
        for axes in (steps, bar):
            axes.set_xlim(0, max(account.lifetime / unit, 1e-9))
        return figure


def _heading(figure: Figure, account: Account, title: str) -> None:
    facts = [
        f"{duration(account.lifetime)}",
        f"{100 * account.goodput:.1f} % productive",
        count(len(account.attempts), "start"),
        count(account.failures, "failure"),
        count(len(account.saves), "save"),
    ]
    figure.text(0.011, 0.962, title, fontsize=17, fontweight="bold", va="center")
    figure.text(0.0115, 0.92, "   ·   ".join(facts), fontsize=10.5, color=GREY, va="center")


def _steps(axes: Axes, account: Account, unit: float) -> None:
    """Draw the step over time; of a stretch that is lost, in red."""
    axes.set_title("Steps: kept, lost, and saved")
    axes.set_ylabel("step")
    labels = {"productive": "steps that count", "lost": "steps that were lost", "save": "checkpoints"}
    for attempt in account.attempts:
        for group, x, y in _curves([each for each in attempt.stretches if each.last]):
            times = [(t - account.began) / unit for t in x]
            # `pop`, so that each colour is in the legend once
            axes.plot(times, y, color=GROUPS[group][1], linewidth=2.2, label=labels.pop(group, None))
        saves = [save for save in attempt.saves if save.committed]
        x = [(save.t - account.began) / unit for save in saves]
        look: dict[str, Any] = {"color": GROUPS["save"][1], "markersize": 4.5 if len(account.saves) < 60 else 2}
        label = labels.pop("save", None) if saves else None
        axes.plot(x, [save.step for save in saves], "o", zorder=3, label=label, **look)
    if account.roll_backs:
        x = [(event["t"] - account.began) / unit for event in account.roll_backs]
        y = [event["from"] for event in account.roll_backs]
        axes.plot(x, y, "v", color=GROUPS["lost"][1], markersize=7, zorder=4, label="roll-backs")
    axes.set_ylim(bottom=0)
    axes.tick_params(labelbottom=False)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="upper left")


def _curves(stretches: list[Stretch]) -> Iterator[tuple[str, list[float], list[float]]]:
    """Yields the stretches of steps as curves; consecutive stretches with the same fate form one curve."""
    fate, x, y = "", list[float](), list[float]()
    for stretch in stretches:
        own = "lost" if stretch.classes.keys() & {"made_again", "undone"} else "productive"
        if own != fate:
            if x:
                yield fate, x, y
            fate, x, y = own, [stretch.begin], [stretch.first - 1.0]
        x += [stretch.begin, stretch.end]
        y += [stretch.first - 1.0, float(stretch.last)]
    if x:
        yield fate, x, y


def _bar(axes: Axes, account: Account, unit: float, name: str) -> None:
    """Draw one bar over the whole time, coloured by class; of a line with several, each has its part of the length."""
    axes.set_title("Time, by start", pad=18)
    bars: dict[str, list[tuple[float, float]]] = {group: [] for group in GROUPS}
    for attempt in account.attempts:
        for stretch in attempt.stretches:
            at = stretch.begin
            for kind, seconds in stretch.classes.items():
                if seconds > 0:
                    bars[GROUP_OF[kind]].append(((at - account.began) / unit, seconds / unit))
                    at += seconds
    for group, (label, color, _) in GROUPS.items():
        if bars[group]:
            axes.broken_barh(bars[group], (0, 1), color=color, linewidth=0, label=label)
    for attempt in account.attempts:
        x = (attempt.began - account.began) / unit
        axes.plot([x, x], [0, 1.12], color=INK, linewidth=0.8, clip_on=False)
        if len(account.attempts) <= 40:  # more numbers would overlap
            axes.text(x, 1.14, f" {attempt.number}", fontsize=8, color=GREY, va="bottom")
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.set_xlabel(name)


def _shares(axes: Axes, account: Account) -> None:
    """Draw the shares of the whole time as one bar, with a legend that has their numbers."""
    left = 0.0
    for label, color, names in GROUPS.values():
        part = 100 * max(0.0, sum(account.classes[name] for name in names)) / max(account.lifetime, 1e-9)
        axes.barh([0], [part], left=left, color=color, height=1, label=f"{label} {part:.1f} %")
        left += part
    axes.set_xlim(0, 100)
    axes.set_ylim(-0.5, 0.5)
    axes.set_yticks([])
    axes.grid(False)
    axes.set_xticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=4, fontsize=9.5)
