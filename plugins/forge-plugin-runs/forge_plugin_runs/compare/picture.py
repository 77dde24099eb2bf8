"""The curves of all that is compared, on the same axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.ticker import EngFormatter

from forge_kit.tools.pictures import GREY, quiet_style, write_figure
from forge_plugin_runs.compare.results import CellResult, Order, Outcome
from forge_plugin_runs.curves.history import Average
from forge_plugin_runs.curves.panels import new_figure
from forge_plugin_runs.final_loss import MEAN_NAME

COLORS = ("#2563eb", "#e8590c", "#0f9d76", "#7c4dbd", "#c1121f", "#0891b2", "#a16207", "#be185d", "#4d7c0f", "#475569")
SMOOTH = 0.02
"""Share of a run over which curves are averaged."""
ORDERED_BY: Mapping[Order, str] = {"held_out": "held-out loss", "mean_loss": MEAN_NAME}
"""Names of the figures in the legend."""
VIEW = 0.15
"""Share of a run whose losses may lie above the picture: with them in view the rest would be flat."""


def draw(rows: Sequence[CellResult], path: Path) -> None:
    """Write a PNG: mean training loss by tokens, with the range over seeds.

    Args:
        rows: best first, as in the legend.
        path: the file.
    """
    with quiet_style():
        figure = new_figure((11, 6.5), heading=0.0)
        axes = figure.subplots()
        axes.set_title(f"Training loss, averaged over {100 * SMOOTH:.0f} % of the steps")
        tops, bottoms = [], []
        for number, row in enumerate(rows):
            color = COLORS[number % len(COLORS)]
            tokens, curves = _curves(row.outcomes)
            # Further rows have the same colours again
            dashed = (0, (4, 2)) if number >= len(COLORS) else "solid"
            label = f"{row.score:.4f}  {row.cell.label}"
            axes.plot(tokens, curves.mean(0), color=color, linewidth=1.6, linestyle=dashed, label=label)
            if len(curves) > 1:
                axes.fill_between(tokens, curves.min(0), curves.max(0), color=color, alpha=0.15, linewidth=0)
            shown = curves[:, int(VIEW * curves.shape[1]) :]
            shown = shown[np.isfinite(shown)]
            # A run that diverged may have no finite loss left to show
            tops.append(shown.max(initial=-np.inf))
            bottoms.append(shown.min(initial=np.inf))
        low, high = min(bottoms), max(tops)
        if np.isfinite(low) and np.isfinite(high):
            margin = 0.05 * (high - low) or 0.1
            axes.set_ylim(low - margin, high + margin)
        axes.set_xlabel("tokens")
        axes.set_ylabel("nats per token")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.legend(loc="upper right", title=f"{ORDERED_BY[rows[0].by]}, best first", alignment="left", labelcolor=GREY)
        write_figure(figure, path, "png")


def _curves(outcomes: Sequence[Outcome]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and smoothed losses (seeds, steps), up to the last step that all seeds have reached."""
    # Seeds may have got unequally far, and a mean needs all of them
    length = min(len(outcome.losses) for outcome in outcomes)
    horizon = max(1, round(SMOOTH * length))
    smooth = []
    for outcome in outcomes:
        average = Average(horizon)
        smooth.append([average.add(loss) for loss in outcome.losses[:length]])
    return np.array(outcomes[0].tokens[:length]), np.array(smooth)
