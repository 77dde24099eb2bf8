"""The law of a mixture: each metric is c + exp(a w) for shares w (log-linear, Ye et al. 2024, arXiv:2403.16952).

Olmix (Chen et al. 2026, arXiv:2602.12237) finds it the best of the forms that were compared. Intervals are by
resampling residuals: of few proxies, a draw of the runs themselves may not determine the law.

Shapes: R proxies, K parts, M metrics, S resamples.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import field, frozen
from scipy.optimize import least_squares
from scipy.special import expit, logit
from scipy.stats import spearmanr

from forge_core.contracts.errors import JobError
from forge_plugin_ladder.values import Values

LOWEST = 0.02
FLOORS = (LOWEST, 0.5, 0.8, 0.95)
"""Starts of c, as parts of the least value."""


@frozen
class MixLaw:
    """The law of one metric."""

    floor: float
    """c, not negative."""
    slopes: Values = field(eq=False)
    """a (K,)."""

    def at(self, shares: Values) -> Values:
        """Returns the metric for shares (…, K)."""
        return self.floor + np.exp(shares @ self.slopes)


@frozen(kw_only=True)
class MixFit:
    """The laws of all metrics, with resamples."""

    metrics: Sequence[str]
    weights: Values = field(eq=False)
    """(M,), of which the objective is the weighted mean."""
    laws: Sequence[MixLaw]
    resamples: Sequence[Sequence[MixLaw]]
    """S times the laws."""
    spread: float
    """Mean deviation of the proxies, relative."""

    def objective(self, shares: Values, laws: Sequence[MixLaw] | None = None) -> Values:
        """Returns the weighted mean of the metrics for shares (…, K)."""
        own = self.laws if laws is None else laws
        return np.stack([law.at(shares) for law in own], axis=-1) @ self.weights


def fit_mixture(
    shares: Values, values: Values, metrics: Sequence[str], weights: Values, count: int, seed: int = 0
) -> MixFit:
    """Fit the law of each metric.

    Args:
        shares: (R, K) of the proxies.
        values: (R, M), the metrics that they ended with.
        metrics: names of these.
        weights: (M,) of these in the objective.
        count: resamples.
        seed: of the resamples.

    Raises:
        JobError: there are too few proxies, or their mixtures do not tell the parts apart.
    """
    runs, parts = shares.shape
    if runs < parts + 3:
        raise JobError(f"{runs} proxies have a result, and a law of {parts} parts needs {parts + 3}")
    if np.linalg.matrix_rank(shares, tol=1e-3) < parts:
        raise JobError("the mixtures of the proxies with a result do not tell all parts apart; add runs")
    # Only their proportions matter
    weights = weights / weights.sum()
    laws = [_fit(shares, column) for column in values.T]
    predicted = np.stack([law.at(shares) for law in laws], axis=1)
    # Residuals of a fit are smaller than the noise
    residuals = (values - predicted) * np.sqrt(runs / (runs - parts - 1))
    generator = np.random.default_rng(seed)
    resamples = []
    for _ in range(count):
        # Rows together, as the metrics of a run have noise in common
        drawn = predicted + residuals[generator.integers(0, runs, runs)]
        resamples.append([_fit(shares, column, law) for column, law in zip(drawn.T, laws, strict=True)])
    return MixFit(
        metrics=metrics,
        weights=weights,
        laws=laws,
        resamples=resamples,
        spread=float(np.abs(predicted / values - 1).mean()),
    )


def _fit(shares: Values, values: Values, start: MixLaw | None = None) -> MixLaw:
    """Least squares; from `start`, or from several floors at which the slopes follow linearly."""
    least = float(values.min())
    parts = FLOORS if start is None else (min(max(start.floor / least, LOWEST), FLOORS[-1]),)
    starts = []
    for part in parts:
        logs = np.log(values - part * least)
        slopes = start.slopes if start else np.linalg.lstsq(shares, logs, rcond=None)[0]
        starts.append(np.append(logit(part), slopes))

    # c between 0 and the least value, by its logit: without bounds, a search is ten times as fast
    def rises(x: Values) -> Values:
        # Bounded: a search may try slopes whose exponential overflows
        return np.exp(np.minimum(shares @ x[1:], 50.0))

    def jacobian(x: Values) -> Values:
        share = expit(x[0])
        first = np.full((len(shares), 1), least * share * (1 - share))
        return np.concatenate([first, rises(x)[:, None] * shares], axis=1)

    found = [
        least_squares(lambda x: least * expit(x[0]) + rises(x) - values, each, jacobian, method="lm", x_scale="jac")
        for each in starts
    ]
    best = min(found, key=lambda each: each.cost)
    return MixLaw(least * float(expit(best.x[0])), best.x[1:])


def rank_correlation(shares: Values, values: Values, weights: Values) -> float:
    """Returns Spearman's correlation of measured objectives with those that are predicted from all other proxies."""
    predicted = []
    for number in range(len(shares)):
        # Of all proxies, the law would have seen what it predicts
        rest = np.arange(len(shares)) != number
        laws = [_fit(shares[rest], column) for column in values[rest].T]
        predicted.append(float(np.array([law.at(shares[number]) for law in laws]) @ weights))
    return float(spearmanr(predicted, values @ weights).statistic)
