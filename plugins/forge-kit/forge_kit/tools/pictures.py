"""The look of pictures of runs, drawn by matplotlib's objects: pyplot would search for a display."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.files import write_atomically
from forge_kit.tools.outputs import MARK

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, GREY = "#1f2933", "#7d8894"
STYLE: dict[str, Any] = {
    "agg.path.chunksize": 10_000,  # without it Agg refuses very long lines
    "axes.axisbelow": True,
    "axes.edgecolor": "#c9d0d8",
    "axes.grid": True,
    "axes.labelcolor": GREY,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "grid.color": "#e9edf1",
    "legend.edgecolor": "none",
    "text.color": INK,
    "xtick.color": GREY,
    "xtick.major.size": 0,
    "ytick.color": GREY,
    "ytick.major.size": 0,
}
"""Settings of all pictures, over matplotlib's default style."""


@contextmanager
def quiet() -> Iterator[None]:
    """Silence matplotlib, which logs its caches as if they were problems."""
    logger = logging.getLogger("matplotlib")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def quiet_style() -> Iterator[None]:
    """A context for drawing and for writing in the common style, in which matplotlib is silent."""
    with quiet():
        from matplotlib import style

        with style.context(["default", STYLE]):
            yield


def write_figure(figure: Figure, path: Path, form: str) -> None:
    """Write a figure in a format such as `png`, with the mark of outputs; a viewer never sees half of it."""
    data = BytesIO()
    # Each format has a different key for the program: Software in PNG, Creator in SVG and PDF
    figure.savefig(data, format=form, metadata={"Software" if form == "png" else "Creator": MARK})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, data.getvalue())
