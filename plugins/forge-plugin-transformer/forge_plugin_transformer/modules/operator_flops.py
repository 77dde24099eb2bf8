"""FLOPs of the distribution's operators, which torch's counter cannot look into.

Counted are the pairs of positions that a causal mask and a window leave, in sequences of one document.

Shapes: B sequences, S positions, H query heads, K key/value heads, E width of a head, V width of its values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.flop_counter import register_flop_formula

from forge_plugin_transformer.scoring import visible_pairs


def count_operator(forward: Any, backward: Any, windows_at: tuple[int, int]) -> None:
    """Register the FLOPs of attention by two operators, whose first tensors are q, k, v, and gradient, q, k, v.

    Args:
        forward: the operator.
        backward: the operator of its backward pass.
        windows_at: places of `window` among the arguments of each. The dispatcher leaves it out where it is 0.
    """

    def window_of(args: Sequence[Any], place: int) -> int:
        return int(args[place]) if len(args) > place else 0

    @register_flop_formula(forward)  # type: ignore[untyped-decorator]
    def forward_flops(*args: Any, **_: Any) -> float:
        q, _k, v = args[:3]
        return _products(q, v, window_of(args, windows_at[0]))

    @register_flop_formula(backward)  # type: ignore[untyped-decorator]
    def backward_flops(*args: Any, **_: Any) -> float:
        """As of flash kernels: scores again, and four products of gradients."""
        _grad, q, _k, v = args[:4]
        return 2.5 * _products(q, v, window_of(args, windows_at[1]))


def _products(q: Sequence[int], v: Sequence[int], window: int) -> float:
    """FLOPs of scores and mixing, from the shapes q (B, S, H, E) and v (B, S, K, V)."""
    batch, length, heads, width = q
    # 2 for a multiplication and an addition
    return 2 * batch * heads * visible_pairs(length, window) * (width + v[3])
