"""How often a run fails, and how far apart its saves should be: formulas, each with its source."""

from __future__ import annotations

import math

GPU_YEARS = 5.8
"""Years of one GPU between failures: 419 unexpected interruptions in 54 days of 16,384 GPUs (Llama 3, Dubey et al.
2024, section 3.3.4)."""
WIDTH = 1.5
"""Width of the prior, in natural logarithms: 5 % of all clusters are more than 100 times better or worse."""
FARTHEST, POINTS = 25.0, 5001
"""Range and number of points at which the posterior is summed up."""
YEAR = 365 * 86400.0
LEAST_TRAINING = 10.0
"""Times the duration of a save that is trained at least between two: saves take a tenth of the time at most."""
LONGEST_S = 3600.0
"""Seconds after which a save is due in any case."""


def expected_mtbf(exposure: float, failures: int, ranks: int, gpu_years: float = GPU_YEARS) -> float:
    """Returns the expected seconds between failures of a run, based on other runs and on the failures it has seen.

    Failures come with a constant rate. The prior of its logarithm is a Laplace distribution around one failure in
    `gpu_years` / `ranks`, of width `WIDTH`: clusters differ by factors, and one that is a hundred times worse than
    Llama 3's is not rare. Its tails are wide, so that what was seen outweighs it from the first few failures on: after
    k failures it moves the rate by a factor of about e^(1 / (`WIDTH` k)). The result is the median-like e^-E(log rate),
    as an interval that is too long by some factor wastes as much as one that is too short by it.
    """
    import numpy as np

    prior = gpu_years * YEAR / ranks
    factors = np.linspace(-FARTHEST, FARTHEST, POINTS)  # logarithms of the rate, relative to the prior's
    logarithms = failures * factors - exposure / prior * np.exp(factors) - np.abs(factors) / WIDTH
    weights = np.exp(logarithms - logarithms.max())  # without the maximum, all of them may underflow to 0
    return prior * math.exp(-float(np.average(factors, weights=weights)))


def mtbf_interval(exposure: float, failures: int, confidence: float = 0.9) -> tuple[float, float]:
    """Returns bounds of the mean time between failures by what was seen alone; the upper one may be infinite.

    They are the exact ones of an observation that ends at a time (Epstein 1960): 2 T / chi-square, with 2 k + 2 and 2 k
    degrees of freedom.
    """
    tail = (1 - confidence) / 2
    low = exposure / gamma_quantile(failures + 1, 1 - tail)
    return low, exposure / gamma_quantile(failures, tail) if failures else math.inf


def gamma_quantile(shape: int, probability: float) -> float:
    """Returns a quantile of Gamma(shape, 1), half the quantile of chi-square(2 shape), for an integer `shape` >= 1."""
    # More than ten standard deviations above the mean: no quantile in use is beyond
    low, high = 0.0, shape + 10.0 * math.sqrt(shape) + 50.0
    for _ in range(200):  # more halvings than float64 has digits
        middle = (low + high) / 2
        low, high = (middle, high) if _gamma_cdf(shape, middle) < probability else (low, middle)
    return (low + high) / 2


def _gamma_cdf(shape: int, x: float) -> float:
    # A Poisson process has fewer than `shape` events by x with this probability, summed by logarithms: e^-x underflows
    if x <= 0:
        return 0.0
    terms = (math.exp(number * math.log(x) - x - math.lgamma(number + 1)) for number in range(shape))
    # Summed exactly: for small probabilities, the difference has few digits
    return 1.0 - math.fsum(terms)


def young(blocked: float, mtbf: float, restart: float = 0.0) -> float:
    """Returns the seconds to train between saves that waste the least time, to first order: sqrt(2 d (M + R)).

    Young 1974; with the restart, Daly 2006 (equation 6).
    """
    return math.sqrt(2 * blocked * (mtbf + restart))


def best_interval(blocked: float, mtbf: float, restart: float, longest: float = LONGEST_S) -> float:
    """Returns `young`, at least ten times the duration of a save, and at most `longest` seconds otherwise."""
    return max(LEAST_TRAINING * blocked, min(longest, young(blocked, mtbf, restart)))


def effective_time(interval: float, blocked: float, restart: float, mtbf: float) -> float:
    """Returns the share of time in steps that count: tau / ((e^((tau + d) / M) - 1) (M + R)), exactly.

    Failures come with a constant rate, also during saves, and not during restarts (Daly 2006, section 3).

    Args:
        interval: seconds of training between saves, tau.
        blocked: seconds that a save keeps training waiting, d.
        restart: seconds from a failure until training continues, including the time until it is noticed, R.
        mtbf: mean seconds between failures, M.
    """
    # `expm1`: the exponent may be small, and e^x - 1 would then lose most digits
    return interval / (math.expm1((interval + blocked) / mtbf) * (mtbf + restart))
