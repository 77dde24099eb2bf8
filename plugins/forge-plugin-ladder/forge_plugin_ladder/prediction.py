"""What a law predicts for budgets: the best size, its tokens and loss, with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from attrs import field, frozen
from scipy.optimize import minimize_scalar

from forge_core.contracts.errors import JobError
from forge_plugin_ladder.fitting import Fit, fit
from forge_plugin_ladder.intervals import LEVEL, Resampled, resample
from forge_plugin_ladder.law import Law, Sizes
from forge_plugin_ladder.parabolas import groups_of
from forge_plugin_ladder.points import Point
from forge_plugin_ladder.tuning import OptimumLaw
from forge_plugin_ladder.values import Values

FAR = 100.0
"""Factor on the FLOPs of the largest run beyond which a prediction has to be asked for."""
WIDTH = 10.0
"""Sizes that are searched, as a distance from the root of the budget in log N."""
RISE = 1e-6
"""Least relative rise of the loss at both ends of these sizes."""
Interval = tuple[float, float]


@frozen(kw_only=True)
class Prediction:
    """The best run of a budget."""

    flops: float
    parameters: float
    parameters_interval: Interval
    tokens: float
    tokens_interval: Interval
    loss: float
    loss_interval: Interval
    """Of the law: where the mean of many such runs would be."""
    run_interval: Interval
    """Of one run, whose loss has the noise of the points."""
    accuracy: float | None = None
    """Of the task, in a second step; None: the ladder has none."""
    accuracy_interval: Interval | None = None
    """Of the law and of the curve together."""
    tuned: Mapping[str, tuple[float, Interval]] = field(factory=dict)
    """Best values of the keys that are tuned, for these parameters and tokens."""


@frozen(kw_only=True)
class HeldOut:
    """The largest budget, predicted by a fit of all others."""

    flops: float
    points: int
    largest_error: float
    """Relative."""
    inside: int
    """Points within the interval of one run."""


class Cost:
    """FLOPs of a token by parameters, as the models of the ladder state them.

    Attention, embedding and head make them no multiple of the parameters, so they are a power of these, fitted to the
    ladder's models; a law's budget is parameters and tokens by it.
    """

    def __init__(self, points: Sequence[Point], total: bool) -> None:
        n = np.log([point.parameters_total if total else point.parameters for point in points])
        of_token = np.log([point.flops / point.tokens for point in points])
        self._slope, self._height = 1.0, float(np.mean(of_token - n))
        if np.ptp(n) > 1e-6:
            self._slope, self._height = map(float, np.polyfit(n, of_token, 1))

    def __call__(self, parameters: float | Values) -> Values:
        """Returns FLOPs of a token."""
        return np.exp(self._height + self._slope * np.log(parameters))


def best_size(found: Fit, flops: float, cost: Cost) -> tuple[float, float, float]:
    """Returns the parameters with the least loss at a budget, their tokens, and that loss.

    Raises:
        JobError: no size is better than all others.
    """

    def loss(log_parameters: float) -> float:
        return float(found.loss(_sizes(np.exp(log_parameters), flops, cost))[0])

    # About the root of the budget, where tokens and parameters are of one order
    middle = np.log(flops) / 2
    bounds = (middle - WIDTH, middle + WIDTH)
    result = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-10})
    # A law of FLOPs alone is flat along a budget, and any size would be returned
    if min(loss(end) for end in bounds) <= result.fun * (1 + RISE):
        raise JobError(
            f"by this law no size is the best of {flops:.3g} FLOPs: the loss has no minimum along the budget"
        )
    sizes = _sizes(np.exp(result.x), flops, cost)
    return float(sizes.parameters[0]), float(sizes.tokens[0]), float(result.fun)


def _sizes(parameters: float, flops: float, cost: Cost) -> Sizes:
    n = np.atleast_1d(parameters)
    return Sizes(parameters=n, tokens=flops / cost(n), unique_tokens=np.full(1, np.inf))


def predict(
    resampled: Resampled,
    flops: float,
    points: Sequence[Point],
    total: bool = False,
    level: float = LEVEL,
    far: bool = False,
    tuned: Mapping[str, OptimumLaw] | None = None,
) -> Prediction:
    """Predict the best run of a budget.

    Args:
        resampled: the fit and its resamples.
        flops: the budget.
        points: of the fit.
        total: as in the fit.
        level: of the intervals.
        far: allow budgets beyond 100 times the largest run.
        tuned: laws of the keys that are tuned.

    Raises:
        JobError: the budget is as large, and `far` is not set, or the law has no best size.
    """
    largest = max(point.flops for point in points if point.usable)
    if flops > FAR * largest and not far:
        raise JobError(
            f"{flops:.3g} FLOPs are {flops / largest:.3g} times the largest run. Beyond {FAR:g} times a law guesses; "
            "--far predicts all the same"
        )
    # The models' own FLOPs of a token: 6 N is off by half for small ones
    cost = Cost(points, total)
    n, d, loss = best_size(resampled.fit, flops, cost)
    sizes, tokens, losses = map(
        np.array, zip(*(best_size(each, flops, cost) for each in resampled.each()), strict=True)
    )
    interval, curve = resampled.interval, resampled.curve
    inside = _inside(points, n) if total else n
    return Prediction(
        flops=flops,
        parameters=n,
        parameters_interval=interval(n, sizes, level),
        tokens=d,
        tokens_interval=interval(d, tokens, level),
        loss=loss,
        loss_interval=interval(loss, losses, level),
        run_interval=interval(loss, with_noise(losses, resampled), level),
        accuracy=curve.at(loss) if curve else None,
        accuracy_interval=curve.interval(losses, level) if curve else None,
        tuned={key: (law.at(inside, d), law.interval(inside, d, level)) for key, law in (tuned or {}).items()},
    )


def _inside(points: Sequence[Point], total: float) -> float:
    """Parameters without embedding and head of a model with `total` parameters, by a power of the ladder's models."""
    every, inside = (np.log([getattr(each, name) for each in points]) for name in ("parameters_total", "parameters"))
    # One size is no line
    slope, height = np.polyfit(every, inside, 1) if np.ptp(every) > 1e-6 else (1.0, float(np.mean(inside - every)))
    return float(np.exp(height + slope * np.log(total)))


def with_noise(losses: Values, resampled: Resampled) -> Values:
    """Returns losses (R,) of single runs in place of the law's: each with the residual of a point, drawn at random."""
    # The same draws for each budget, so that a frontier is smooth
    noise = np.random.default_rng(0).choice(resampled.residuals, len(losses))
    return losses * np.exp(noise)


def held_out(law: Law, points: Sequence[Point], total: bool, count: int, level: float = LEVEL) -> HeldOut | None:
    """Predict the largest budget from all others; None where these are too few for a fit."""
    # By FLOPs and not by labels: points of other programs have none
    groups = groups_of(points)
    rest = [point for group in groups[:-1] for point in group]
    # A fit of the others may be refused, although all together have one
    try:
        resampled = resample(fit(law, rest, total), rest, total, count)
    except JobError:
        return None
    errors, inside = [], 0
    for point in groups[-1]:
        size = Sizes(
            parameters=np.array([point.parameters_total if total else point.parameters]),
            tokens=np.array([point.tokens]),
            unique_tokens=np.array([point.unique_tokens]),
        )
        predicted = float(resampled.fit.loss(size)[0])
        losses = np.array([each.loss(size)[0] for each in resampled.each()])
        low, high = resampled.interval(predicted, with_noise(losses, resampled), level)
        errors.append(abs(predicted / point.loss - 1))
        inside += low <= point.loss <= high
    return HeldOut(flops=groups[-1][-1].flops, points=len(groups[-1]), largest_error=max(errors), inside=inside)
