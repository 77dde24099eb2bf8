"""Intervals of a fit, by resampling runs with replacement.

Points of one run are drawn together, as they share its noise (Efron and Tibshirani 1993, section 8.3). Deviations from
the fit are widened by sqrt(G / (G - V)) for G runs and V values of the law: resamples vary less than new ladders would,
as the residuals of a fit are smaller than the noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from attrs import evolve, field, frozen

from forge_core.contracts.errors import JobError
from forge_plugin_ladder.accuracy import Curve
from forge_plugin_ladder.fitting import Fit, Search, sizes_of
from forge_plugin_ladder.points import Point
from forge_plugin_ladder.values import Values

RESAMPLES = 1000
LEVEL = 0.9


@frozen(kw_only=True)
class Resampled:
    """A fit and its resamples."""

    fit: Fit
    coefficients: Values = field(eq=False)
    """(R, K), of R resamples."""
    exponents: Values = field(eq=False)
    """(R, E)."""
    residuals: Values = field(eq=False)
    """log(measured) - log(predicted) of the points that were fitted, (P,)."""
    widened: float
    """Factor on deviations from the fit."""
    failed: int
    """Resamples whose search did not converge; they are left out."""
    draws: Sequence[Values] = field(default=(), eq=False)
    """Rows of the points in each resample; none of a fit that was read from a file."""
    curve: Curve | None = field(default=None, eq=False)
    """Accuracy by the loss, where the ladder has a second step."""

    def each(self) -> Sequence[Fit]:
        """Returns the resamples as fits."""
        pairs = zip(self.coefficients, self.exponents, strict=True)
        return [evolve(self.fit, coefficients=c, exponents=e) for c, e in pairs]

    def interval(self, estimate: float, values: Values, level: float = LEVEL) -> tuple[float, float]:
        """Returns the interval of a positive quantity that is `estimate` in the fit and `values` (R,) in resamples."""
        # By ratios: exponents, sizes and losses are positive, and stay so.
        ratios = np.log(values / estimate) * self.widened
        low, high = np.quantile(ratios, [(1 - level) / 2, (1 + level) / 2])
        return estimate * math.exp(low), estimate * math.exp(high)


def resample(
    fit: Fit, points: Sequence[Point], total: bool = False, count: int = RESAMPLES, seed: int = 0
) -> Resampled:
    """Fit `count` draws of the runs.

    Args:
        fit: of all points.
        points: the same as in the fit.
        total: as in the fit.
        count: resamples.
        seed: of the draws.

    Raises:
        JobError: there are fewer runs than values and two, or a tenth of the searches does not converge.
    """
    usable = [point for point in points if point.usable]
    sizes, losses = sizes_of(usable, total), np.array([point.loss for point in usable])
    # Branches of one trunk are one run, like several points of it
    runs: dict[str, list[int]] = {}
    for number, point in enumerate(usable):
        runs.setdefault(point.source, []).append(number)
    values = len(fit.coefficients) + len(fit.exponents)
    if len(runs) < values + 2:
        raise JobError(
            f"{len(runs)} independent runs have a loss, and an interval needs {values + 2}: add sizes or seeds, or "
            "budgets of runs that share no trunk"
        )
    # Searched from the fit's values: a grid for each draw would take thirty times as long
    groups, generator, search = list(runs.values()), np.random.default_rng(seed), Search(fit.law, sizes, losses)
    found = list[tuple[Fit, Values]]()
    for _ in range(count):
        drawn = generator.integers(0, len(groups), len(groups))
        rows = np.concatenate([groups[number] for number in drawn])
        found.append((search.polish(fit.coefficients, fit.exponents, fit.threshold, rows), rows))
    # A draw may leave out all runs of the smallest sizes
    kept = [each for each, _ in found if each.converged]
    if len(kept) < 0.9 * count:
        raise JobError(
            f"{count - len(kept)} of {count} resamples did not converge: the points do not determine the law"
        )
    return Resampled(
        fit=fit,
        coefficients=np.stack([each.coefficients for each in kept]),
        exponents=np.stack([each.exponents for each in kept]),
        residuals=np.log(losses / fit.loss(sizes)),
        widened=math.sqrt(len(groups) / (len(groups) - values)),
        failed=count - len(kept),
        draws=[rows for each, rows in found if each.converged],
    )
