"""Axes: where ticks stand, and how their numbers are written."""

from __future__ import annotations

import math
from collections.abc import Sequence

from attrs import frozen

UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
WIDE = 30.0
"""Ratio of the largest to the least value from which a noisy curve has a logarithmic axis."""


@frozen
class Scale:
    """Maps values to a length, linearly or by their logarithm."""

    low: float
    high: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        """Returns the place of a value: 0 at the low end, 1 at the high one, beyond these outside."""
        low, high = self.low, self.high
        if self.logarithmic:
            # 0 has no logarithm, and is far below any axis
            value, low, high = math.log(max(value, 1e-300)), math.log(low), math.log(high)
        return (value - low) / (high - low)

    def widened(self, share: float) -> Scale:
        """The same with a margin at both ends."""
        if self.logarithmic:
            # A share of the length of the axis, which is the logarithm of this ratio
            factor = (self.high / self.low) ** share
            return Scale(self.low / factor, self.high * factor, True)
        margin = share * (self.high - self.low)
        return Scale(self.low - margin, self.high + margin)

    def ticks(self, count: int) -> list[float]:
        """Returns some `count` round values inside."""
        if self.logarithmic and (ticks := self._decades(count)):
            return ticks
        step = _round_step((self.high - self.low) / count)
        first = math.ceil(self.low / step - 1e-9)
        # Rounded, as 3 x 0.1 is 0.30000000000000004
        return [round(number * step, 12) for number in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def _decades(self, count: int) -> list[float]:
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for factors in ((1,), (1, 3), (1, 2, 5)):
            ticks = [factor * 10.0**power for power in powers for factor in factors]
            inside = [tick for tick in ticks if self.low <= tick <= self.high]
            # Decades first; finer values only where few decades are in view
            if len(inside) >= 3:
                return inside[:: -(-len(inside) // (count + 2))]
        return []


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return power * next(factor for factor, most in ((1, 1.5), (2, 3.5), (5, 7.5), (10, 10.1)) if step <= most * power)


def number_text(value: float, digits: int = 4) -> str:
    """Returns a number in few characters: `12.5k`, `0.034`, `3e-5`."""
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else "∞" if value > 0 else "-∞"
    for scale, unit in UNITS:
        # Four digits are readable as they are: k begins at 10,000
        if abs(value) >= 10 * scale if unit == "k" else abs(value) >= scale:
            return f"{value / scale:.{digits}g}{unit}"
    if value and abs(value) < 1e-3:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(exponent)}"
    return f"{value:.{digits}g}" if abs(value) < 1000 else f"{value:,.0f}"


def spark(values: Sequence[float], width: int = 24) -> str:
    """Returns a curve in one line of text; a value that is not finite is a cross."""
    if not values:
        return ""
    # Parts are of nearly equal size, and none is empty
    columns = min(width, len(values))
    parts = [values[n * len(values) // columns : (n + 1) * len(values) // columns] for n in range(columns)]
    means = [sum(part) / len(part) for part in parts]
    shown = [mean for mean in means if math.isfinite(mean)]
    low, reach = (min(shown), max(shown) - min(shown)) if shown else (0.0, 0.0)
    blocks = "▁▂▃▄▅▆▇█"
    return "".join(
        blocks[min(7, int(8 * (mean - low) / reach)) if reach else 3] if math.isfinite(mean) else "×" for mean in means
    )
