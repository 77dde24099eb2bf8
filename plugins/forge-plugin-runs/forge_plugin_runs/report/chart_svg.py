"""Charts as SVG. The script of the page reads the curves back from their paths, so that they are in the file once.

Coordinates of curves are whole hundredths of a unit of the picture: their values are exact to 1/19,400 of the axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise

import numpy as np
from attrs import frozen

from forge_kit.tools.report_sections import Chart, Line
from forge_plugin_runs.report.columns import Reduced, reduce, visible_range
from forge_plugin_runs.report.scales import WIDE, Scale, number_text

WIDTH, HEIGHT = 460, 226
LEFT, TOP, RIGHT, BOTTOM = 46, 8, 10, 24
INNER_WIDTH, INNER_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
FINE = 100
"""Coordinates of curves in a unit of the picture."""
COLORS = 8
"""Number of colours in the style; further runs have them again with other dashes."""
DASHES = (0, 0, 0, 1, 1, 1, 2, 3)
"""How the first runs are dashed: those with equal dashes have colours that no colour blindness makes alike."""
CROWD = 40
"""Points from which they have no dots."""
MARKS = 30
"""Marks of spikes outside the picture, or of values that are not finite, of one curve: the largest, or the first."""


@frozen
class _Curve:
    line: Line
    reduced: Reduced

    @property
    def colors(self) -> str:
        return color_classes(self.line.run.number)


def color_classes(number: int) -> str:
    """Returns the classes of a run's colour and dashes in the style of the page."""
    turn, color = divmod(number, COLORS)
    return f"c{color} d{(DASHES[color] + turn) % (1 + max(DASHES))}"


def chart_svg(chart: Chart) -> str:
    """Returns the SVG of a chart, with the axes in attributes that the script of the page reads."""
    curves = [_Curve(line, reduce(line.x, line.y)) for line in chart.lines]
    horizontal, vertical = _scales(curves, chart.axis)
    parts = [*_grid(horizontal, vertical), *_curves(curves, horizontal, vertical)]
    parts += [mark for curve in curves for mark in _marks(curve, horizontal, vertical)]
    axes = f'data-x="{horizontal.low!r} {horizontal.high!r}" data-y="{vertical.low!r} {vertical.high!r}"'
    kind = "step" if chart.x == "step" else ""
    label = escape(f"{chart.title} against {chart.x}: {', '.join(line.run.name for line in chart.lines)}")
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}" {axes}'
        f' data-log="{int(vertical.logarithmic)}" data-kind="{kind}">{"".join(parts)}</svg>'
    )


def caption(chart: Chart) -> str:
    """Returns a sentence on what the strong and pale lines are; empty where there is only one kind."""
    reduced = [reduce(line.x, line.y) for line in chart.lines]
    windows = sorted({each.window for each in reduced if each.window > 1})
    words = []
    if windows:
        span = f"{windows[0]:,}" if len(windows) == 1 else f"{windows[0]:,} to {windows[-1]:,}"
        words.append(f"mean of {span} values")
    if any(each.band for each in reduced):
        words.append("least to largest value pale")
    elif windows:
        words.append("each value pale")
    return ", ".join(words)


def _scales(curves: Sequence[_Curve], axis: str) -> tuple[Scale, Scale]:
    places = [place for each in curves for place in (*each.reduced.extremes[:, 0], *each.reduced.broken)]
    left, right = (min(places), max(places)) if places else (0.0, 1.0)
    if left == right:
        left, right = left - 1, right + 1
    # A curve that begins near 0 is easier to compare on an axis that begins at 0
    left = 0.0 if 0 < left < 0.2 * right else left
    reduced = [curve.reduced for curve in curves]
    low, high = visible_range([each.extremes for each in reduced])
    least = min((float(each.extremes[:, 1].min()) for each in reduced if len(each.extremes)), default=0.0)
    noisy = any(each.window > 1 for each in reduced)
    logarithmic = least > 0 and (axis == "log" or (axis == "auto" and noisy and high / low > WIDE))
    return Scale(float(left), float(right)), Scale(low, high, logarithmic).widened(0.05)


def _grid(horizontal: Scale, vertical: Scale) -> Iterator[str]:
    yield '<g class="axes">'
    for tick in vertical.ticks(5):
        y = TOP + INNER_HEIGHT * (1 - vertical.at(tick))
        yield f'<path class="grid" d="M{LEFT} {y:.1f}h{INNER_WIDTH}"/>'
        yield f'<text class="y" x="{LEFT - 6}" y="{y + 3.6:.1f}">{number_text(tick)}</text>'
    for tick in horizontal.ticks(5):
        x = LEFT + INNER_WIDTH * horizontal.at(tick)
        yield f'<text class="x" x="{x:.1f}" y="{HEIGHT - 6}">{number_text(tick)}</text>'
    yield "</g>"


def _curves(curves: Sequence[_Curve], horizontal: Scale, vertical: Scale) -> Iterator[str]:
    """Yields everything pale first, so that no band of one run hides the line of another."""
    yield (
        # An inner picture has whole coordinates, and clips curves at the axes
        f'<svg x="{LEFT}" y="{TOP}" width="{INNER_WIDTH}" height="{INNER_HEIGHT}" preserveAspectRatio="none"'
        f' viewBox="0 0 {FINE * INNER_WIDTH} {FINE * INNER_HEIGHT}">'
    )
    for curve in curves:
        run, reduced = curve.line.run.number, curve.reduced
        if reduced.band is not None:
            low, high = reduced.band
            outline = np.concatenate([reduced.x, reduced.x[::-1]]), np.concatenate([high, low[::-1]])
            yield f'<path class="band {curve.colors}" data-run="{run}" d="{_path(*outline, horizontal, vertical)}z"/>'
        elif reduced.points is not None:
            path = _path(*reduced.points, horizontal, vertical)
            yield f'<path class="points {curve.colors}" data-run="{run}" d="{path}"/>'
    for curve in curves:
        run, reduced = curve.line.run.number, curve.reduced
        if not len(reduced.x):
            continue
        path = _path(reduced.x, reduced.y, horizontal, vertical)
        yield f'<path class="line {curve.colors}" data-run="{run}" d="{path}"/>'
        if len(reduced.x) < CROWD and reduced.points is None:
            yield f'<path class="dots {curve.colors}" data-run="{run}" d="{_dots(reduced, horizontal, vertical)}"/>'
    yield "</svg>"


def _coordinates(x: np.ndarray, y: np.ndarray, horizontal: Scale, vertical: Scale) -> Iterator[tuple[int, int]]:
    for place, value in zip(x.tolist(), y.tolist(), strict=True):
        across = round(FINE * INNER_WIDTH * horizontal.at(place))
        yield across, round(FINE * INNER_HEIGHT * (1 - vertical.at(value)))


def _path(x: np.ndarray, y: np.ndarray, horizontal: Scale, vertical: Scale) -> str:
    """Returns a path of relative steps, which are short: `M0 940l168-12 168 40`."""
    points = list(_coordinates(x, y, horizontal, vertical))
    # A minus sign separates numbers by itself
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(points)]
    text = " ".join(f"{across} {down}" for across, down in steps).replace(" -", "-")
    # A single point has no steps; a path of no length is drawn as a dot, by its round ends
    return f"M{points[0][0]} {points[0][1]}" + (f"l{text}" if steps else "h0")


def _dots(reduced: Reduced, horizontal: Scale, vertical: Scale) -> str:
    return "".join(f"M{x} {y}h0" for x, y in _coordinates(reduced.x, reduced.y, horizontal, vertical))


def _marks(curve: _Curve, horizontal: Scale, vertical: Scale) -> Iterator[str]:
    """Yields triangles for values beyond the picture, and crosses for those that are not finite."""
    outside = [
        (place, value) for place, value in curve.reduced.extremes.tolist() if not vertical.low <= value <= vertical.high
    ]
    # The farthest first, as only some of many are drawn
    for place, value in sorted(outside, key=lambda point: -abs(point[1]))[:MARKS]:
        sign, y = ("▲", TOP + 9) if value > vertical.high else ("▼", TOP + INNER_HEIGHT - 1)
        yield _mark(curve, place, y, sign, f"{number_text(value)} at {place:,.0f}", horizontal)
    for place in curve.reduced.broken[:MARKS]:
        yield _mark(curve, place, TOP + INNER_HEIGHT - 2, "×", f"not finite at {place:,.0f}", horizontal)


def _mark(curve: _Curve, place: float, y: float, sign: str, words: str, horizontal: Scale) -> str:
    x = LEFT + INNER_WIDTH * horizontal.at(place)
    title = escape(f"{curve.line.run.name}: {words}")
    return (
        f'<text class="mark {curve.colors}" x="{x:.1f}" y="{y}" data-run="{curve.line.run.number}" data-at="{place!r}">'
        f"{sign}<title>{title}</title></text>"
    )
