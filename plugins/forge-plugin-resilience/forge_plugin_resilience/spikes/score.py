"""The score by which a value is a spike or not."""

from __future__ import annotations

import math
from collections.abc import Sequence

from attrs import frozen

MAD_TO_DEVIATION = 1.4826
"""The standard deviation of a normal distribution, in median absolute deviations: 1 / Φ⁻¹(3/4)."""
LEAST_DEVIATION = 1e-3
"""Smallest deviation of logarithms that is divided by, 0.1 % of the value: a window of equal values has none at all."""


@frozen
class Score:
    """How far a value lies above earlier ones."""

    z: float
    """Deviations above the median, of logarithms; negative below it, infinite for a value that is not finite."""
    median: float
    """Median of the earlier values; NaN if there are none."""


def robust_score(value: float, logarithms: Sequence[float]) -> Score:
    """Score a value by earlier ones: z = (x - median) / (1.4826 MAD), of natural logarithms.

    MAD is the median of the absolute distances from the median. Up to half of the earlier values may be spikes
    themselves, where a single one already shifts a mean and widens a standard deviation (Huber 1981, "Robust
    Statistics"). Logarithms, because losses and norms are positive and skewed, and change by factors.

    Args:
        value: the new value, which is not among the earlier ones: positive, or not finite.
        logarithms: natural logarithms of the earlier values, in any order.
    """
    if not logarithms:
        # With nothing to compare it with, a value stands out only if it is not finite
        return Score(math.nan if math.isfinite(value) else math.inf, math.nan)
    center = median(logarithms)
    if not math.isfinite(value):
        return Score(math.inf, math.exp(center))
    deviation = MAD_TO_DEVIATION * median([abs(x - center) for x in logarithms])
    return Score((math.log(value) - center) / max(deviation, LEAST_DEVIATION), math.exp(center))


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the middle two."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2
