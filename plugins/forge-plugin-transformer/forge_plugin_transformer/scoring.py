"""How attention makes weights of scores, apart from the causal mask; without torch."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen


@frozen
class Scoring:
    """From products of queries and keys to weights of values. The defaults are plain causal attention."""

    window: int = 0
    """Positions that one sees at most: itself and the `window` - 1 before it (of its document); 0: no such limit."""
    scale: float = 0.0
    """Factor on products; 0: 1 / sqrt(E), E being the width of a head."""
    soft_cap: float = 0.0
    """c > 0: scores are c tanh(score / c), as in Gemma 2; 0: they stay as they are."""
    sinks: bool = False
    """Whether each query head has a score that takes part in the softmax and has no value, as in gpt-oss."""

    def window_in(self, length: int) -> int:
        """Returns the window in a sequence, 0 if it hides nothing there."""
        # With as many positions as the window has, the last position still sees the first
        return self.window if self.window < length else 0

    def factor(self, width: int) -> float:
        """Returns the factor on products of heads of this width."""
        return self.scale or width**-0.5

    @property
    def given_scale(self) -> float | None:
        """`scale` as torch's kernels take it: None for 1 / sqrt(E)."""
        return self.scale or None

    @property
    def plain_softmax(self) -> bool:
        """Whether weights are the softmax of scaled products, so that torch's kernels compute them, given a mask."""
        return not (self.soft_cap or self.sinks)

    def options(self) -> Mapping[str, float]:
        """Returns the differences from plain causal attention, by name, for `mixing()` of a sequence mixer."""
        values = {"window": self.window, "scale": self.scale, "soft_cap": self.soft_cap, "sinks": self.sinks}
        return {name: value for name, value in values.items() if value}


def visible_pairs(length: int, window: int = 0) -> float:
    """Returns how many pairs of positions of a sequence see each other, with half of each position's own.

    Without a window these are half of all pairs.
    """
    window = min(window or length, length)
    # Position i sees min(i, window) others: window² / 2 pairs while the window fills, `window` for each position after
    return window * length - window * window / 2


PLAIN = Scoring()
"""Scores scaled by 1 / sqrt(E), and every earlier position seen."""
