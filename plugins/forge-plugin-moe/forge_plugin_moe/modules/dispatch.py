"""Tokens to the rows of experts, and back.

Shapes: T tokens, K experts of each, M = T x K rows, ordered by expert; D model width; E experts.

Going there copies each token K times, and coming back adds K rows up, so one is the gradient of the other. Both are
gathers along a permutation: no two writes meet, and results do not depend on their order.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from torch import Tensor


@frozen
class Order:
    """Rows ordered by expert."""

    sources: Tensor
    """(M,) the token and choice, t x K + k, that each row comes from."""
    rows: Tensor
    """(M,) the row of each token and choice: the inverse."""
    counts: Tensor
    """(E,) rows of each expert. Rows beyond their sum are of tokens that no expert takes."""
    choices: int
    """K."""

    @classmethod
    def by_expert(cls, experts: Tensor, number: int) -> Order:
        """Of choices (T, K) among `number` experts, -1 being none. Tokens keep their order within an expert."""
        flat = experts.flatten()
        flat = flat.where(flat >= 0, number)
        ordered, sources = flat.sort(stable=True)
        rows = torch.empty_like(sources)
        rows[sources] = torch.arange(len(sources), device=sources.device)
        # Other than for `bincount`, the host need not wait for this.
        ends = torch.searchsorted(ordered, torch.arange(number, device=flat.device), right=True)
        return cls(sources, rows, ends.diff(prepend=ends.new_zeros(1)), experts.shape[-1])


def to_rows(tokens: Tensor, order: Order) -> Tensor:
    """(T, D) -> (M, D)."""
    return _ToRows.apply(tokens, order)


def add_up(rows: Tensor, weights: Tensor, order: Order) -> Tensor:
    """(M, D), weights (T, K) -> (T, D): the weighted sum of each token's rows."""
    own = _Permute.apply(rows, order.rows, order.sources).view(*weights.shape, -1)
    return (weights.to(rows.dtype).unsqueeze(-2) @ own).squeeze(-2)


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Order) -> Tensor:
        ctx.order = order
        return tokens.index_select(0, order.sources // order.choices)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        copies = grad.index_select(0, ctx.order.rows)
        return copies.view(-1, ctx.order.choices, grad.shape[-1]).sum(1), None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None
