"""Long curves in the columns of a picture: least, mean and largest value of each, so that spikes survive."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from attrs import frozen

COLUMNS = 240
"""Columns of a picture: two fifths of the width of a chart on a wide screen, and enough for each bend."""
FEW = 2 * COLUMNS
"""Number of points up to which all of them are drawn."""
ROUGH = 6.0
"""Ups and downs, as a multiple of the range, from which a curve is noisy: a rate that rises and falls has 2."""
NOISY_LENGTH = 60
"""Points from which a noisy curve is smoothed."""


@frozen(kw_only=True, eq=False)
class Reduced:
    """A curve as it is drawn. All arrays have finite values only."""

    x: np.ndarray
    y: np.ndarray
    """The strong line: mean of the neighbourhood where the curve is noisy, else its values."""
    points: tuple[np.ndarray, np.ndarray] | None
    """Every point, pale behind the strong line; None where that shows them already, or there are too many."""
    band: tuple[np.ndarray, np.ndarray] | None
    """Least and largest value of each column, of a curve with too many points."""
    window: int
    """Points of a mean; 1: none."""
    broken: tuple[float, ...]
    """Places of values that are not finite."""
    extremes: np.ndarray
    """Places and values of the least and largest point of each column, two columns of an array."""


def reduce(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> Reduced:
    """Reduces a curve to what a picture can show."""
    places, values = np.asarray(x, float), np.asarray(y, float)
    is_finite = np.isfinite(values)
    broken = tuple(places[~is_finite].tolist())
    places, values = places[is_finite], values[is_finite]
    starts = column_starts(len(values))
    extremes = _extremes(places, values, starts)
    # A spike of a thousand times the loss counts as far as the picture goes: it has a mark, and the mean stays visible
    calm = np.clip(values, *visible_range([extremes]))
    window = max(7, len(values) // 40) if is_noisy(calm) else 1
    smooth = moving_mean(calm, window) if window > 1 else values
    if len(values) <= FEW:
        points = (places, values) if window > 1 else None
        # A smooth line needs no more points than the picture has columns
        kept = starts_and_end(len(values)) if window > 1 else slice(None)
        line = places[kept], smooth[kept]
        return Reduced(x=line[0], y=line[1], points=points, band=None, window=window, broken=broken, extremes=extremes)
    # Columns may have unequally many points
    counts = np.diff([*starts, len(values)])
    centres = np.add.reduceat(places, starts) / counts
    means = np.add.reduceat(smooth, starts) / counts
    band = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
    return Reduced(x=centres, y=means, points=None, band=band, window=window, broken=broken, extremes=extremes)


def is_noisy(values: np.ndarray) -> bool:
    """Whether a curve goes up and down too much to be read without a mean."""
    if len(values) < NOISY_LENGTH:
        return False
    reach = float(np.ptp(values))
    return reach > 0 and float(np.abs(np.diff(values)).sum()) > ROUGH * reach


def moving_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Returns the mean of some `window` values around each one, of fewer at the ends, nearer ones with more weight.

    Unlike an average of the past, it does not lag. It is the mean of means, so that a spike makes no box.
    """
    if window <= 1 or not len(values):
        return values
    return _centred_mean(_centred_mean(values, window // 2), window // 2)


def _centred_mean(values: np.ndarray, window: int) -> np.ndarray:
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    # As many on either side: with more on one, a falling curve would bend at its ends
    half = np.minimum(np.minimum(at, at[::-1]), window // 2)
    return (sums[at + half + 1] - sums[at - half]) / (2 * half + 1)


def column_starts(length: int) -> np.ndarray:
    """Returns the index at which each column starts, of `length` points."""
    return np.unique(np.linspace(0, length, min(COLUMNS, length), endpoint=False).astype(int))


def starts_and_end(length: int) -> np.ndarray:
    """Returns the index of the first point of each column, and the index of the very last point."""
    return np.unique([*column_starts(length), max(0, length - 1)]).astype(int)


def visible_range(extremes: Sequence[np.ndarray]) -> tuple[float, float]:
    """Returns the least and largest value that a chart shows: everything, unless spikes would flatten the rest.

    Medians of eight or more points are always visible, and with them a loss that falls at the start; 98 % of all
    columns' extremes are too.

    Args:
        extremes: of each curve, as `Reduced` has them.
    """
    values = np.concatenate([each[:, 1] for each in extremes]) if extremes else np.empty(0)
    if not len(values):
        return 0.0, 1.0
    most = np.quantile(values, (0.01, 0.99))
    medians = np.concatenate([_medians(each[:, 1]) for each in extremes])
    low, high = float(min(most[0], medians.min())), float(max(most[1], medians.max()))
    full_low, full_high, reach = float(values.min()), float(values.max()), high - low
    # Each end by itself: an outlier below is no reason to cut the peaks
    if full_low >= low - reach or len(values) < 16 or not reach:
        low = full_low
    if full_high <= high + reach or len(values) < 16 or not reach:
        high = full_high
    # A constant curve in the middle of the picture
    if math.isclose(low, high, rel_tol=1e-9):
        reach = 0.05 * abs(low) or 0.5
        return low - reach, high + reach
    return low, high


def _medians(values: np.ndarray) -> np.ndarray:
    size = max(8, len(values) // COLUMNS)
    return np.array([np.median(values[at : at + size]) for at in range(0, len(values), size)])


def _extremes(places: np.ndarray, values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    if len(values) <= FEW:
        return np.stack([places, values], axis=1)
    kept = set[int]()
    for begin, end in zip(starts, [*starts[1:], len(values)], strict=True):
        kept |= {int(begin + values[begin:end].argmin()), int(begin + values[begin:end].argmax())}
    # In the order of places, as a curve is drawn through them
    at = sorted(kept)
    return np.stack([places[at], values[at]], axis=1)
