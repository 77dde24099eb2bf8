"""The best mixture by a law, within limits on repetition, and what it gains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from attrs import field, frozen
from scipy.optimize import minimize

from forge_core.contracts.errors import JobError
from forge_plugin_ladder.mix.mixture import Parts
from forge_plugin_ladder.mix.regression import MixFit, MixLaw
from forge_plugin_ladder.values import Values

LEVEL = 0.9


@frozen(kw_only=True)
class Proposal:
    """A mixture and its gain over the natural one."""

    shares: Values = field(eq=False)
    """Of the parts, (K,)."""
    intervals: Sequence[tuple[float, float]]
    """Of the shares, by the best mixtures of the resamples."""
    weights: Mapping[str, float]
    """Of the sources."""
    natural: float
    """Objective of the natural mixture, by the law."""
    objective: float
    gain: float
    """Of the natural mixture's objective minus this one's."""
    gain_interval: tuple[float, float]


def limits(parts: Parts, sizes: Mapping[str, float], epochs: Mapping[str, float], tokens: float) -> Values:
    """Returns the largest share of each part, (K,), so that no source is passed more often than it may be.

    Args:
        parts: of the mixture.
        sizes: tokens of each source.
        epochs: passes that each may have; 0: any number.
        tokens: of the run; 0: no limits.

    Raises:
        JobError: together they have too little for the run.
    """
    bounds = np.ones(len(parts.names))
    for place, name in enumerate(parts.sources):
        if not (tokens and epochs[name]):
            continue
        largest = sizes[name] * epochs[name] / tokens
        for part, share in enumerate(parts.inner[:, place]):
            if share > 0:
                bounds[part] = min(bounds[part], largest / share)
    if bounds.sum() < 1:
        raise JobError(f"max_epochs leaves {bounds.sum():.3g} of {tokens:.3g} tokens; raise it, or lower tokens")
    return bounds


def propose(fit: MixFit, parts: Parts, bounds: Values, regularization: float, level: float = LEVEL) -> Proposal:
    """Returns the mixture with the least objective, with the intervals of its shares and of its gain."""
    best = _best(fit, fit.laws, parts, bounds, regularization, _within(parts.natural, bounds))
    # The only minimum from everywhere, and sooner from nearby
    others = np.stack([_best(fit, laws, parts, bounds, regularization, best) for laws in fit.resamples])
    ends = [(1 - level) / 2, (1 + level) / 2]
    natural, objective = float(fit.objective(parts.natural)), float(fit.objective(best))
    # A mixture is chosen because it looks good: in each resample, by how much its own best looks better than it is
    errors = [
        _gain(fit, parts, each, laws) - _gain(fit, parts, each, fit.laws)
        for each, laws in zip(others, fit.resamples, strict=True)
    ]
    low, high = natural - objective - np.quantile(errors, ends[::-1])
    return Proposal(
        shares=best,
        intervals=[(float(low), float(high)) for low, high in np.quantile(others, ends, axis=0).T],
        weights=parts.weights(best),
        natural=natural,
        objective=objective,
        gain=natural - objective,
        gain_interval=(float(low), float(high)),
    )


def _gain(fit: MixFit, parts: Parts, shares: Values, laws: Sequence[MixLaw]) -> float:
    return float(fit.objective(parts.natural, laws) - fit.objective(shares, laws))


def _best(
    fit: MixFit, laws: Sequence[MixLaw], parts: Parts, bounds: Values, regularization: float, start: Values
) -> Values:
    """The minimum of objective and divergence from the natural mixture: both are convex, so that it is the only one."""
    # Shares of 0 would make the divergence of any other infinite
    prior = np.maximum(parts.natural, 1e-6)

    def cost(shares: Values) -> float:
        divergence = np.sum(shares * np.log(np.maximum(shares, 1e-12) / prior))
        return float(fit.objective(shares, laws) + regularization * divergence)

    def gradient(shares: Values) -> Values:
        rises = np.array([law.at(shares) - law.floor for law in laws])
        slopes = np.stack([law.slopes for law in laws])
        return (fit.weights * rises) @ slopes + regularization * (np.log(np.maximum(shares, 1e-12) / prior) + 1)

    found = minimize(
        cost,
        start,
        jac=gradient,
        method="SLSQP",
        bounds=[(0.0, float(bound)) for bound in bounds],
        constraints={"type": "eq", "fun": lambda shares: shares.sum() - 1, "jac": np.ones_like},
        options={"ftol": 1e-12, "maxiter": 500},
    )
    if not found.success and cost(found.x) > cost(start):
        raise JobError(f"the search for the best mixture did not converge ({found.message})")
    shares = np.clip(found.x, 0.0, bounds)
    # Shares that no proxy can have measured are none
    shares = np.where(shares < 1e-4, 0.0, shares)
    return shares / shares.sum()


def _within(shares: Values, bounds: Values) -> Values:
    """The shares, with the excess over a bound given to the others in proportion to their room."""
    clipped = np.minimum(shares, bounds)
    room = bounds - clipped
    return clipped + (1 - clipped.sum()) * room / max(float(room.sum()), 1e-12)
