"""How attention makes weights of scores; without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import frozen

if TYPE_CHECKING:
    from forge_plugin_transformer.kinds import AttentionMaskComponent


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
    mask: AttentionMaskComponent | None = None
    """Which positions of a document see each other; None: each sees itself and all earlier ones."""

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

    @property
    def causal(self) -> bool:
        """Whether no position sees a later one."""
        return self.mask is None or self.mask.causal

    @property
    def dense_mask(self) -> bool:
        """Whether kernels get a matrix of all pairs, as `mask` does more than cut documents into blocks."""
        # Here, as that module imports this one
        from forge_plugin_transformer.kinds import BlockMaskComponent

        return self.mask is not None and not isinstance(self.mask, BlockMaskComponent)

    @property
    def reach(self) -> int:
        """How many positions one looks back at most, itself included, by window and mask; 0: no limit."""
        limits = (self.window, 0 if self.mask is None else self.mask.reach())
        return min((limit for limit in limits if limit), default=0)

    def options(self) -> Mapping[str, Any]:
        """Returns the differences from plain causal attention, by name, for `mixing()` of a sequence mixer."""
        values = {
            "window": self.window,
            "scale": self.scale,
            "soft_cap": self.soft_cap,
            "sinks": self.sinks,
            # Under two names, as not all that computes the one computes the other
            "mask" if self.causal else "bidirectional_mask": self.mask,
        }
        return {name: value for name, value in values.items() if value}

    def pairs(self, length: int) -> float:
        """Returns how many pairs of positions of a sequence see each other, with half of each position's own."""
        if self.mask is None:
            return visible_pairs(length, self.window)
        pairs = self.mask.pairs(length)
        # The closer one of both stands for their combination
        return min(pairs, visible_pairs(length, self.window)) if self.window else pairs


def visible_pairs(length: int, window: int = 0) -> float:
    """Returns how many pairs of positions of a sequence see each other, with half of each position's own.

    Without a window these are half of all pairs.
    """
    window = min(window or length, length)
    # Position i sees min(i, window) others: window² / 2 pairs while the window fills, `window` for each position after
    return window * length - window * window / 2


PLAIN = Scoring()
"""Scores scaled by 1 / sqrt(E), and every earlier position seen."""
