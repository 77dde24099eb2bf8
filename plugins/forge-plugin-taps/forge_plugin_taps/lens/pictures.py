"""Heat maps of what a model does inside, drawn by matplotlib's objects: pyplot would search for a display."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_kit.tools.pictures import GREY, INK, quiet, quiet_style, write_figure

with quiet():
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties, findfont, get_font
    from matplotlib.layout_engine import ConstrainedLayoutEngine

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from forge_plugin_taps.lens.head_maps import AttentionMaps
    from forge_plugin_taps.lens.layer_predictions import LogitLens
    from forge_plugin_taps.lens.patching import PatchingEffects

HEADING_INCHES, COLUMN_INCHES, ROW_INCHES = 0.9, 0.62, 0.34
SHARES, EFFECTS = "Blues", "RdBu"
"""Colour maps of shares from 0 to 1, and of numbers on both sides of 0."""
FEW_CELLS = 400
"""With more, numbers inside the cells of a map could not be read."""
TALL, WIDE = 8, 1.2
"""Tokens that a map with labels has at most, and inches of a small map."""


def has_glyphs(text: str) -> bool:
    """Returns whether the font of pictures has all letters of a text; matplotlib's own has no Chinese, say."""
    glyphs = get_font(findfont(FontProperties())).get_charmap()
    return all(ord(letter) in glyphs for letter in text)


def draw_lens(lens: LogitLens, inputs: Sequence[str], tokens: Sequence[Sequence[str]], path: Path, title: str) -> None:
    """Draw the likeliest token of each layer and position; the last layer is at the top.

    Args:
        lens: of the positions that are shown.
        inputs: the prompt's tokens there, and the one behind them ("" if unknown).
        tokens: texts of the likeliest tokens, by row of `lens` and position.
        path: of the PNG file.
        title: of the picture.
    """
    # matplotlib's first row is at the top, and the first layer is to be at the bottom.
    shares = lens.probabilities[..., 0].float().cpu().numpy()[::-1]
    with quiet_style():
        facts = (
            "the likeliest next token, if each layer were the last; colour: its probability; bold: as the model's own"
        )
        figure, axes = _single(shares.shape, title, facts)
        image = _map(axes, shares, 0.0, 1.0, SHARES)
        final = tokens[-1]
        for row, texts in enumerate(reversed(tokens)):
            for column, text in enumerate(texts):
                weight = "bold" if text == final[column] else "normal"
                color = "white" if shares[row, column] > 0.6 else INK
                axes.text(column, row, text, ha="center", va="center", fontsize=8, color=color, fontweight=weight)
        names = [name.removesuffix(".resid_post") for name in lens.names]
        _labels(axes, names[::-1], inputs[:-1])
        above = axes.secondary_xaxis("top")
        above.set_xticks(range(len(inputs) - 1), list(inputs[1:]), fontsize=8, color=GREY)
        above.tick_params(length=0)
        above.spines["top"].set_visible(False)
        axes.set_xlabel("token read (above: the one that came next)", fontsize=9)
        _scale(figure, axes, image)
        write_figure(figure, path, "png")


def draw_effects(effects: PatchingEffects, inputs: Sequence[str], path: Path, title: str) -> None:
    """Draw the effect of each activation: layers from below, positions from the left.

    Args:
        effects: of all points and positions.
        inputs: tokens of both prompts.
        path: of the PNG file.
        title: of the picture.
    """
    values = effects.effects.double().numpy()[::-1]
    with quiet_style():
        facts = (
            f"1: the clean prompt's answer is back (difference of logits {effects.clean:.2f}); "
            f"0: as in the corrupted one ({effects.corrupted:.2f})"
        )
        figure, axes = _single(values.shape, title, facts)
        # Symmetric, so that white is 0; at least 1, so that small effects look small
        bound = max(1.0, float(np.abs(values).max()))
        image = _map(axes, values, -bound, bound, EFFECTS)
        if values.size <= FEW_CELLS:
            for row, column in np.ndindex(values.shape):
                dark = abs(values[row, column]) > 0.6 * bound
                text = f"{values[row, column]:.2f}".replace("-0.00", "0.00")
                axes.text(column, row, text, ha="center", va="center", fontsize=7.5, color="white" if dark else INK)
        _labels(axes, effects.points[::-1], inputs)
        axes.set_xlabel("token whose activation is put in (clean → corrupted, where they differ)", fontsize=9)
        _scale(figure, axes, image)
        write_figure(figure, path, "png")


def draw_attention(maps: AttentionMaps, inputs: Sequence[str], path: Path, title: str) -> None:
    """Draw a map for each head: queries from above, keys from the left.

    Args:
        maps: of the layers and heads that are shown, as rows and columns.
        inputs: the prompt's tokens.
        path: of the PNG file.
        title: of the picture.
    """
    rows, columns = len(maps.layers), len(maps.heads)
    labelled = rows * columns <= TALL
    size = max(2.6, 0.23 * len(inputs)) if labelled else WIDE
    with quiet_style():
        facts = "what each position (row) attends to (column); colour: weight, from 0 to 1"
        figure = _figure((max(6.5, 1.0 + columns * (size + 0.15)), 1.1 + rows * (size + 0.3)), title, facts)
        grid = figure.subplots(rows, columns, squeeze=False)
        for row, layer in enumerate(maps.layers):
            for column, head in enumerate(maps.heads):
                axes = grid[row, column]
                image = _map(axes, maps.weights[row, column].float().numpy(), 0.0, 1.0, SHARES)
                axes.set_title(f"layer {layer}, head {head}", fontsize=9 if labelled else 7, pad=3, loc="left")
                if labelled:
                    _labels(axes, inputs, inputs, rotated=True)
                else:
                    axes.set_xticks([])
                    axes.set_yticks([])
        _scale(figure, [*grid.flat], image)
        write_figure(figure, path, "png")


def _single(shape: tuple[int, ...], title: str, facts: str) -> tuple[Figure, Axes]:
    rows, columns = shape
    size = (max(7.5, 2.4 + columns * COLUMN_INCHES), 1.9 + rows * ROW_INCHES)
    figure = _figure(size, title, facts)
    return figure, figure.add_subplot()


def _figure(size: tuple[float, float], title: str, facts: str) -> Figure:
    heading = HEADING_INCHES / size[1]
    layout = ConstrainedLayoutEngine(rect=(0.005, 0.005, 0.99, 0.99 - heading), wspace=0.02, hspace=0.02)
    figure = Figure(figsize=size, dpi=120, layout=layout)
    # Sets itself as the canvas of the figure, which without pyplot has one that cannot draw
    FigureCanvasAgg(figure)
    figure.text(0.12 / size[0], 1 - 0.3 / size[1], title, fontsize=14, fontweight="bold", va="center")
    figure.text(0.125 / size[0], 1 - 0.62 / size[1], facts, fontsize=9.5, color=GREY, va="center", wrap=True)
    return figure


def _map(axes: Axes, values: np.ndarray, low: float, high: float, colors: str) -> Any:
    image = axes.imshow(values, vmin=low, vmax=high, cmap=colors, aspect="auto", interpolation="nearest")
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return image


def _scale(figure: Figure, axes: Axes | list[Axes], image: Any) -> None:
    bar = figure.colorbar(image, ax=axes, fraction=0.03, pad=0.01)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)  # type: ignore[operator]


def _labels(axes: Axes, rows: Sequence[str], columns: Sequence[str], *, rotated: bool = False) -> None:
    axes.set_yticks(range(len(rows)), list(rows), fontsize=8)
    axes.set_xticks(range(len(columns)), list(columns), fontsize=8, rotation=90 if rotated else 0)
