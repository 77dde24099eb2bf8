"""FLOPs of operators, by the shapes of their inputs in a trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

Shape = Sequence[int]


def _product(a: Shape, b: Shape) -> float:
    """(…, M, K) and (…, K, N)."""
    return 2.0 * prod(a) * b[-1]


def _grouped(a: Shape, b: Shape) -> float:
    """Rows of a (M, K), each by one of the matrices b (E, K, N); or by columns, with a (M, K) and b (K, N) split."""
    return 2.0 * prod(a[-2:]) * b[-1]


def _attention(query: Shape, key: Shape, value: Shape) -> float:
    """(B, H, S, E), (B, K, T, E), (B, K, T, V): scores and mixing, over all pairs."""
    return 2.0 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _attention_backward(_gradient: Shape, query: Shape, key: Shape, value: Shape) -> float:
    """Scores once more, and two products for each product of the forward pass."""
    pairs = prod(query[:-1]) * key[-2]
    return 2.0 * pairs * (3 * query[-1] + 2 * value[-1])


FORMULAS: Mapping[str, tuple[int, int, Callable[..., float]]] = {
    "aten::mm": (0, 2, _product),
    "aten::bmm": (0, 2, _product),
    "aten::addmm": (1, 3, _product),
    "aten::baddbmm": (1, 3, _product),
    "aten::_scaled_mm": (0, 2, _product),
    "aten::_grouped_mm": (0, 2, _grouped),
    "aten::_scaled_grouped_mm": (0, 2, _grouped),
    **{
        f"aten::_scaled_dot_product_{kernel}": (0, 3, _attention)
        for kernel in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
    },
    **{
        f"aten::_scaled_dot_product_{kernel}_backward": (0, 4, _attention_backward)
        for kernel in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
    },
}
"""By the name of an operator: first and last input that the formula takes. What these call has no formula, so that
nothing counts twice."""


def operator_flops(name: str, shapes: Sequence[Shape]) -> float:
    """Returns the FLOPs of a call: matrix products and attention, as torch.utils.flop_counter counts; else 0.

    Attention counts all pairs of positions, masked ones too, where `Model.flops` counts half of them if it is causal.
    """
    formula = FORMULAS.get(name)
    if formula is None:
        return 0.0
    first, last, count = formula
    inputs = shapes[first:last]
    # A trace that was recorded without shapes has no inputs here
    return count(*inputs) if len(inputs) == last - first and all(inputs) else 0.0
