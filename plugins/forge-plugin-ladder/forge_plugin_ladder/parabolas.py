"""IsoFLOP parabolas: the best size of each budget, beside the law's, and what makes it doubtful.

Loss against log N at equal FLOPs is fitted by a parabola, whose minimum is the budget's best size (Hoffmann et al.
2022, approach 2). Its exponent is biased where the grid is wide, uneven or off its minimum (2603.22339).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from attrs import field, frozen

from forge_plugin_ladder.points import Point
from forge_plugin_ladder.values import Values

LEAST = 4
"""Points of a parabola, one more than it has values."""
EQUAL = 0.1
"""Relative difference up to which FLOPs are one budget: tokens are whole steps."""
OFF_CENTRE = 0.15
"""Part of the grid's width by which its middle may be off the minimum."""
UNEVEN = 1.5
"""Largest distance of neighbouring sizes, relative to the smallest."""


@frozen(kw_only=True)
class Parabola:
    """The curve of one budget."""

    flops: float
    best: float
    """Parameters at the minimum."""
    loss: float
    """There."""
    curvature: float
    """Coefficient of (log N)², positive."""
    parameters: Values = field(eq=False)
    losses: Values = field(eq=False)
    warnings: Sequence[str]


@frozen(kw_only=True)
class IsoFlops:
    """The curves of all budgets."""

    parabolas: Sequence[Parabola]
    exponent: float
    """Of the best size against FLOPs; NaN with fewer than two curves."""
    warnings: Sequence[str]


def iso_flops(points: Sequence[Point], total: bool = False) -> IsoFlops:
    """Fit a parabola to each budget that has enough sizes; budgets without a minimum are named in the warnings."""
    parabolas, warnings = [], []
    for group in groups_of(points):
        own = {point.parameters_total if total else point.parameters for point in group}
        # Budgets in tokens have other FLOPs for each size, and are no curve
        if len(own) < LEAST:
            continue
        found = _parabola(group, total)
        if isinstance(found, str):
            warnings.append(found)
        else:
            parabolas.append(found)
            warnings += found.warnings
    # One curve has a best size, and no growth of it
    exponent = float("nan")
    if len(parabolas) > 1:
        best, flops = (np.log([getattr(each, name) for each in parabolas]) for name in ("best", "flops"))
        exponent = float(np.polyfit(flops, best, 1)[0])
    return IsoFlops(parabolas=parabolas, exponent=exponent, warnings=warnings)


def groups_of(points: Sequence[Point]) -> list[list[Point]]:
    """Returns the points that have a loss by budgets of equal FLOPs, from the least."""
    groups: list[list[Point]] = []
    for point in sorted((point for point in points if point.usable), key=lambda point: point.flops):
        # Against the first of the group, so that a chain of small steps is not one budget
        if groups and point.flops <= groups[-1][0].flops * (1 + EQUAL):
            groups[-1].append(point)
        else:
            groups.append([point])
    return groups


def _parabola(group: Sequence[Point], total: bool) -> Parabola | str:
    parameters = np.array([point.parameters_total if total else point.parameters for point in group])
    losses, flops = np.array([point.loss for point in group]), float(np.mean([point.flops for point in group]))
    # Around the mean, as powers of log N alone are nearly parallel
    x = np.log(parameters)
    bend, slope, height = np.polyfit(x - x.mean(), losses, 2)
    # Noise at the scale of the curve can turn it over
    if bend <= 0:
        return f"budget {flops:.3g}: the losses have no minimum"
    offset = -slope / (2 * bend)
    if not x.min() < x.mean() + offset < x.max():
        return f"budget {flops:.3g}: the minimum is outside of the sizes that were trained"
    # Of the parabola, not of the point that happens to be lowest
    best = x.mean() + offset
    return Parabola(
        flops=flops,
        best=float(np.exp(best)),
        loss=float(height - slope**2 / (4 * bend)),
        curvature=float(bend),
        parameters=parameters,
        losses=losses,
        warnings=list(_doubts(np.unique(x), best, flops)),
    )


def _doubts(x: Values, best: float, flops: float) -> Iterator[str]:
    # In log N, where the grid should be even
    width, steps = x[-1] - x[0], np.diff(x)
    middle = (x[0] + x[-1]) / 2
    if abs(middle - best) > OFF_CENTRE * width:
        side = "above" if middle > best else "below"
        yield f"budget {flops:.3g}: the middle of its sizes is {side} the minimum, which biases the exponent"
    if steps.max() > UNEVEN * steps.min():
        yield f"budget {flops:.3g}: its sizes are spaced unevenly, which biases the exponent"
