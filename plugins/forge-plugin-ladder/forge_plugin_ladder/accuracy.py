"""Accuracy of a task in two steps: the law gives its loss, and the accuracy follows from that by a curve.

The curve is low + (high - low) / (1 + exp(k (L - middle))), the second step of Bhagia et al. 2024 (arXiv:2412.04403):
near chance for large losses, and flat again where a task is solved. It is fitted by least squares, as the noise of a
mean over questions hardly depends on the loss.

Shapes: P points, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from attrs import field, frozen
from scipy.optimize import least_squares, nnls

from forge_core.contracts.errors import JobError
from forge_plugin_ladder.points import Point
from forge_plugin_ladder.values import Values

NAMES = ("low", "high", "k", "middle")
SOURCE = "Bhagia et al. 2024 (arXiv:2412.04403)"
STEEPEST = 50.0
"""Largest k, in widths of the losses of the points."""
LEAST_RISE = 0.02
"""Difference of accuracy within the points below which nothing is fitted."""


@frozen(kw_only=True)
class Curve:
    """Accuracy as a function of the loss."""

    values: Values = field(eq=False)
    """low, high, k, middle: (4,)."""
    resamples: Values = field(eq=False)
    """The same of each resample of the law, (R, 4); NaN where the search did not converge."""
    spread: float
    """Mean deviation of the points."""

    def at(self, loss: float) -> float:
        """Returns the accuracy at a loss."""
        return float(curve(self.values, np.array(loss)))

    def interval(self, losses: Values, level: float) -> tuple[float, float]:
        """Returns the interval of the accuracy for the losses (R,) of the resamples."""
        found = curve(self.resamples.T, losses)
        low, high = np.nanquantile(found, [(1 - level) / 2, (1 + level) / 2])
        return float(low), float(high)


def curve(values: Values, losses: Values) -> Values:
    """Returns accuracies."""
    low, high, k, middle = values
    # tanh, as exp of a steep curve would overflow
    return low + (high - low) * 0.5 * (1 - np.tanh(0.5 * k * (losses - middle)))


def fit_curve(points: Sequence[Point], draws: Sequence[Values]) -> Curve:
    """Fit the curve to the points that have an accuracy.

    Args:
        points: those that were fitted by the law, in its order.
        draws: rows of the points in each resample of the law.

    Raises:
        JobError: there are too few points, or their accuracies do not rise as the loss falls.
    """
    losses = np.array([point.loss for point in points])
    accuracies = np.array([point.accuracy for point in points])
    if missing := [point.run for point in points if not math.isfinite(point.accuracy)]:
        raise JobError(f"{len(missing)} of {len(points)} points have no accuracy, such as {missing[0]}")
    if len(points) < len(NAMES) + 2:
        raise JobError(f"the curve of accuracy has 4 values, and {len(points)} points; a fit needs 6 at least")
    best = min((_search(losses, accuracies, start) for start in _starts(losses, accuracies)), key=lambda each: each[1])
    values = best[0]
    rise = float(np.ptp(curve(values, losses)))
    if rise < LEAST_RISE:
        raise JobError(
            f"accuracy rises by {100 * rise:.1f} points over all runs: it has not left chance yet, and no curve "
            "follows from it. Take a task that these sizes learn, or its bits a byte alone"
        )
    resamples = [_search(losses[rows], accuracies[rows], values) for rows in draws]
    return Curve(
        values=values,
        resamples=np.array([each if math.isfinite(cost) else np.full(4, np.nan) for each, cost in resamples]).reshape(
            -1, 4
        ),
        spread=float(abs(curve(values, losses) - accuracies).mean()),
    )


def _starts(losses: Values, accuracies: Values) -> list[Values]:
    """Values from which searches start: on a grid of k and middle, at which the ends follow from least squares."""
    width, starts = max(float(np.ptp(losses)), 1e-9), []
    for k in (1.0, 4.0, 16.0):
        for middle in np.quantile(losses, [0.0, 0.25, 0.5, 0.75, 1.0]):
            shape = curve(np.array([0.0, 1.0, k / width, middle]), losses)
            (low, rise), _ = nnls(np.stack([np.ones_like(shape), shape], axis=1), accuracies)
            starts.append(np.array([min(low, 1), min(low + rise, 1), k / width, middle]))
    return starts


def _search(losses: Values, accuracies: Values, start: Values) -> tuple[Values, float]:
    """The values of the least squared error, and that error; infinite if the search did not converge."""
    width = max(float(np.ptp(losses)), 1e-9)
    # A task that is not solved yet may end anywhere up to 1, and its middle may be ahead of all runs
    least = np.array([0.0, 0.0, 0.0, losses.min() - 3 * width])
    largest = np.array([1.0, 1.0, STEEPEST / width, losses.max() + 3 * width])
    found = least_squares(
        lambda values: curve(values, losses) - accuracies,
        np.clip(start, least + 1e-9, largest - 1e-9),
        bounds=(least, largest),
        x_scale=np.array([0.1, 0.1, 1 / width, width]),
    )
    return found.x, float(found.cost) if found.status > 0 else math.inf
