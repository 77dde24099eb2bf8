"""Fits of a law: robust, from many starts, and refused where they say nothing.

The objective is the sum over points of Huber's loss of log(predicted) - log(measured), as Hoffmann et al. 2022 have it.
Coefficients and exponents are searched together from the best points of a grid over the exponents, at each of which the
coefficients follow from linear least squares (`Law`). Huber's threshold is 1.345 times the spread of the residuals,
where the estimate has 95 % of the efficiency of least squares if the noise is normal; a fixed 0.001, which Hoffmann et
al. took, makes an absolute deviation of everything that is noisier.

Shapes: P points, K coefficients, E exponents.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from attrs import evolve, field, frozen
from scipy import stats
from scipy.optimize import least_squares, nnls

from forge_core.contracts.errors import JobError
from forge_plugin_ladder.law import Law, Sizes
from forge_plugin_ladder.points import Point
from forge_plugin_ladder.values import Values

GRID = 8
"""Values of each exponent at which searches may start."""
STARTS = 4
"""Best points of the grid from which the search starts."""
EFFICIENT = 1.345
"""Huber's threshold in standard deviations: 95 % of the efficiency of least squares under normal noise."""
FIRST_THRESHOLD = 1e-3
"""Hoffmann et al.'s, until the residuals are known."""
LEAST_THRESHOLD = 1e-7
SMALLEST = 1e-6
"""Least part of the loss that a term may have, in the geometric mean over the points."""
EXACT = 1e-6
"""Residuals below this are rounding, and no trend is looked for."""
TREND = 1e-3
"""Probability, under the law, of residuals that are as far from noise; below it the law is refused."""


@frozen(kw_only=True)
class Fit:
    """A law with its values."""

    law: Law
    coefficients: Values = field(eq=False)
    """(K,)."""
    exponents: Values = field(eq=False)
    """(E,)."""
    threshold: float
    """Huber's, in log space."""
    cost: float
    """Value of the objective."""
    converged: bool

    def values(self) -> dict[str, float]:
        """Returns coefficients and exponents by name."""
        names = (*self.law.coefficients, *self.law.exponents)
        return dict(zip(names, map(float, (*self.coefficients, *self.exponents)), strict=True))

    def loss(self, sizes: Sizes) -> Values:
        """Returns the law's loss at each size (P,)."""
        return self.law.loss(self.coefficients, self.exponents, sizes)


class _Objective:
    """Residuals of a law as a function of x: the logarithms of coefficients, then the exponents.

    Coefficients are taken at the middle of the points, where terms are divided by their geometric means: at N = 1 they
    would change by orders of magnitude with every step of their exponents.
    """

    def __init__(self, law: Law, sizes: Sizes, losses: Values) -> None:
        self._law, self._sizes, self._count = law, sizes, len(law.coefficients)
        self._losses, self._logs = losses, np.log(losses)

    def means(self, exponents: Values) -> Values:
        """Geometric means of the terms over the points: (K,)."""
        return np.exp(np.log(self._law.terms(exponents, self._sizes)).mean(0))

    def parts(self, x: Values) -> Values:
        """Parts of the predicted losses: (P, K)."""
        terms = self._law.terms(x[self._count :], self._sizes)
        return terms / np.exp(np.log(terms).mean(0)) * np.exp(x[: self._count])

    def residuals(self, x: Values) -> Values:
        """log(predicted) - log(measured): (P,)."""
        return np.log(self.parts(x).sum(1)) - self._logs

    def jacobian(self, x: Values) -> Values:
        """Derivatives of the residuals by x: (P, K + E)."""
        # By coefficients in closed form; by exponents numerically, as a stranger's law states its terms alone
        parts = self.parts(x)
        columns = [parts / parts.sum(1, keepdims=True)]
        for number in range(self._count, len(x)):
            step = np.zeros_like(x)
            step[number] = 1e-6 * max(1.0, abs(x[number]))
            up, down = self.residuals(x + step), self.residuals(x - step)
            columns.append(((up - down) / (2 * step[number]))[:, None])
        return np.concatenate(columns, axis=1)

    def bounds(self) -> tuple[Values, Values]:
        """The least and the largest x."""
        low, high = (np.array(ends) for ends in zip(*self._law.exponents.values(), strict=True))
        # Logarithms cannot make a coefficient negative; a term that vanishes stops at the floor
        floor, ceiling = np.log(SMALLEST * self._losses.mean()), self._logs.max() + 5
        least = np.concatenate([np.full(self._count, floor), low])
        return least, np.concatenate([np.full(self._count, ceiling), high])

    def x_of(self, coefficients: Values, exponents: Values) -> Values:
        """Values of a law as x, within the bounds."""
        low, high = self.bounds()
        exponents = np.clip(exponents, low[self._count :], high[self._count :])
        logs = np.log(np.maximum(coefficients * self.means(exponents), 1e-30))
        # scipy demands a start within the bounds, not on them
        return np.clip(np.concatenate([logs, exponents]), low + 1e-9, high - 1e-9)

    def values_of(self, x: Values) -> tuple[Values, Values]:
        """Coefficients and exponents."""
        exponents = x[self._count :]
        return np.exp(x[: self._count]) / self.means(exponents), exponents


class Search:
    """Searches the values of a law for points that stay the same, with resamples of them."""

    def __init__(self, law: Law, sizes: Sizes, losses: Values) -> None:
        self._law, self._sizes, self._losses = law, sizes, losses

    def from_grid(self) -> Fit:
        """The best of several searches, each from a point of the grid, with the threshold of its residuals."""
        starts = sorted(self._starts(), key=lambda start: start[0])[:STARTS]
        fits = [self.polish(coefficients, exponents, FIRST_THRESHOLD) for _, coefficients, exponents in starts]
        # Starts end in one place or in a worse one; that the best has converged is asked for later
        best = min(fits, key=lambda fit: fit.cost)
        residuals = np.log(best.loss(self._sizes) / self._losses)
        # The median does not see single runs that went wrong
        spread = float(stats.median_abs_deviation(residuals, scale="normal"))
        return self.polish(best.coefficients, best.exponents, max(EFFICIENT * spread, LEAST_THRESHOLD))

    def polish(self, coefficients: Values, exponents: Values, threshold: float, rows: Values | None = None) -> Fit:
        """Search from these values for the least objective over all points, or over `rows` of them."""
        sizes, losses = (self._sizes, self._losses) if rows is None else (_take(self._sizes, rows), self._losses[rows])
        objective = _Objective(self._law, sizes, losses)
        found = least_squares(
            objective.residuals,
            objective.x_of(coefficients, exponents),
            objective.jacobian,
            bounds=objective.bounds(),
            loss="huber",
            f_scale=threshold,
            x_scale="jac",
            ftol=1e-12,
            xtol=1e-10,
            gtol=1e-14,
            max_nfev=300,
        )
        coefficients, exponents = objective.values_of(found.x)
        return Fit(
            law=self._law,
            coefficients=coefficients,
            exponents=exponents,
            threshold=threshold,
            cost=float(found.cost),
            converged=found.status > 0,
        )

    def _starts(self) -> Iterator[tuple[float, Values, Values]]:
        """Squared relative error, coefficients and exponents at each point of the grid."""
        # By ratios: the least exponents differ more in their curves than the largest
        axes = [np.geomspace(low, high, GRID) for low, high in self._law.exponents.values()]
        for exponents in map(np.array, itertools.product(*axes)):
            terms = self._law.terms(exponents, self._sizes) / self._losses[:, None]
            # Columns of one size: N ** -2 would be rounding beside 1
            scale = terms.max(0)
            coefficients, error = nnls(terms / scale, np.ones(len(terms)))
            yield error, coefficients / scale, exponents


def sizes_of(points: Sequence[Point], total: bool) -> Sizes:
    """Returns the sizes of points, with `total` by parameters that include embeddings."""
    parameters = [point.parameters_total if total else point.parameters for point in points]
    columns = parameters, [point.tokens for point in points], [point.unique_tokens for point in points]
    return Sizes(**dict(zip(("parameters", "tokens", "unique_tokens"), map(np.array, columns), strict=True)))


def _take(sizes: Sizes, rows: Values) -> Sizes:
    return evolve(
        sizes,
        parameters=sizes.parameters[rows],
        tokens=sizes.tokens[rows],
        unique_tokens=sizes.unique_tokens[rows],
    )


def fit(law: Law, points: Sequence[Point], total: bool = False) -> Fit:
    """Fit a law to points.

    Args:
        law: its form.
        points: those that are not `usable` are left out.
        total: take parameters with embeddings.

    Raises:
        JobError: there are too few points, the search did not converge, a value is at a bound, or the residuals have a
            trend that the law does not describe. Or held-out and training losses are mixed.
    """
    # Two more than values: with fewer, residuals are no measure of noise
    usable = [point for point in points if point.usable]
    values = len(law.coefficients) + len(law.exponents)
    if len(usable) < values + 2:
        raise JobError(
            f"the law has {values} values, and {len(usable)} of {len(points)} points have a loss; "
            f"a fit needs {values + 2} at least"
        )
    if len({point.held_out for point in usable}) > 1:
        mixed = next(point.run for point in usable if not point.held_out)
        raise JobError(f"some losses are of held-out text, and {mixed} has a training loss; evaluate all runs or none")
    sizes, losses = sizes_of(usable, total), np.array([point.loss for point in usable])
    _demand_repetition(law, sizes)
    found = Search(law, sizes, losses).from_grid()
    _demand_sound(found, sizes, losses)
    return found


def _demand_repetition(law: Law, sizes: Sizes) -> None:
    """Raise where a law counts repeated tokens as fresh ones."""
    if not np.any(sizes.unique_tokens < sizes.tokens):
        return
    # By number, at any exponents: this holds for laws that nobody here has seen
    middle = np.array([math.sqrt(low * high) for low, high in law.exponents.values()])
    fresh = evolve(sizes, unique_tokens=np.full_like(sizes.tokens, np.inf))
    if np.array_equal(law.terms(middle, sizes), law.terms(middle, fresh)):
        raise JobError(
            "some runs repeat tokens, which this law counts as fresh ones; take a law with unique tokens in it, "
            "such as `repeated`"
        )


def _demand_sound(found: Fit, sizes: Sizes, losses: Values) -> None:
    """Raise where a fit is not one."""
    if not found.converged:
        raise JobError("the search for the law's values did not converge: no values are better than all others")
    for name, value, (low, high) in zip(
        found.law.exponents, found.exponents, found.law.exponents.values(), strict=True
    ):
        if min(value - low, high - value) < 1e-4 * (high - low):
            raise JobError(
                f"{name} is at the bound of what was searched ({value:.4g} of {low:g} to {high:g}): the points do not "
                "determine it. Vary parameters and tokens more, by a factor of ten at least"
            )
    # Coefficients may have any unit; a term's part in the loss has none
    shares = found.coefficients * np.exp(np.log(found.law.terms(found.exponents, sizes)).mean(0)) / losses.mean()
    for name, share in zip(found.law.coefficients, shares, strict=True):
        if share < 10 * SMALLEST:
            raise JobError(f"{name} has no part in the loss of these points, so that the law is another one")
    residuals = np.log(found.loss(sizes) / losses)
    # Points may be computed from a law: then all is rounding, and rounding has trends
    if np.abs(residuals).max() < EXACT:
        return
    chance, where = trend(found, sizes, residuals)
    if chance < TREND:
        raise JobError(
            f"what the law leaves is no noise: it bends with {where} (by chance with a probability of {chance:.1g}). "
            "Runs that were stopped within their schedule, or had poor rates, do this; so does another law"
        )


def trend(found: Fit, sizes: Sizes, residuals: Values) -> tuple[float, str]:
    """Returns how probable residuals as bent are if the law holds, and the bend that stands out.

    Lack of fit by an F test: curvature in log N, log D and their product is added to what the law's own values can
    change, to first order.
    """
    n, d = (np.log(values / np.exp(np.log(values).mean())) for values in (sizes.parameters, sizes.tokens))
    added = {"parameters": n**2, "tokens": d**2, "the two together": n * d}
    tangent = _tangent(found, sizes)
    # What remains of each curvature when the law's values follow it as far as they can
    basis = np.linalg.qr(tangent)[0]
    # Curvature that the law can make itself is no evidence against it
    free = {name: column - basis @ (basis.T @ column) for name, column in added.items()}
    # With one budget, the curvatures are functions of each other
    free = {
        name: column for name, column in free.items() if np.linalg.norm(column) > 1e-3 * np.linalg.norm(added[name])
    }
    # Huber's residuals are not orthogonal to the tangent, in contrast to least squares
    left = residuals - basis @ (basis.T @ residuals)
    if not free or len(left) <= tangent.shape[1] + len(free):
        return 1.0, ""
    columns = np.stack(list(free.values()), axis=1)
    rank = np.linalg.matrix_rank(columns)
    bent = columns @ np.linalg.lstsq(columns, left, rcond=None)[0]
    others = len(left) - tangent.shape[1] - rank
    ratio = (bent @ bent / rank) / max((left - bent) @ (left - bent) / others, 1e-300)
    strength = {name: abs(left @ column) / np.linalg.norm(column) for name, column in free.items()}
    return float(stats.f.sf(ratio, rank, others)), max(strength, key=strength.__getitem__)


def _tangent(found: Fit, sizes: Sizes) -> Values:
    """Derivatives of the log of the loss by the law's values: (P, K + E)."""
    terms = found.law.terms(found.exponents, sizes)
    columns = [terms * found.coefficients / found.loss(sizes)[:, None]]
    for number in range(len(found.exponents)):
        step = np.zeros_like(found.exponents)
        step[number] = 1e-5
        up, down = (found.law.loss(found.coefficients, found.exponents + s, sizes) for s in (step, -step))
        columns.append((np.log(up / down) / 2e-5)[:, None])
    return np.concatenate(columns, axis=1)
