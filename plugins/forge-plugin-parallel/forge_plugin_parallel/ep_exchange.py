"""A stack of experts that ranks share: a dispatcher brings tokens to them (GShard, Lepikhin et al. 2020).

Shapes: T tokens; K choices of each; N tokens that arrive at a rank; D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from forge_core.contracts.errors import ForgeError
from forge_kit.nn.dispatch import ExpertStack, TokenDispatcher
from forge_plugin_parallel.tp_ways import local_parameters


@frozen
class LocalExperts:
    """A stack that computes with this rank's experts; see `forge_kit.nn.dispatch.ExpertStack`."""

    stack: nn.Module
    forward: ExpertStack

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        with local_parameters(*self.stack.modules()):
            return self.forward(*args, **kwargs)


@frozen
class Exchange:
    """A stack whose experts are divided over ranks, around the stack of this rank's experts, or of its node's.

    See `forge_kit.nn.dispatch.ExpertStack`. Where nodes share a stack and the ranks of each node share its part, one
    exchange is the `forward` of another.
    """

    forward: ExpertStack
    """The stack of this rank's experts, or of its node's."""
    dispatcher: TokenDispatcher
    overlap: bool = True
    """Whether `overlap_fn` is called while tokens are being sent, or before."""

    def __call__(
        self,
        tokens: Tensor,
        weights: Tensor,
        chosen: Tensor,
        rows: int | None = None,
        overlap_fn: Callable[[], None] | None = None,
    ) -> Tensor:
        if overlap_fn is not None and not self.overlap:
            overlap_fn()
        dispatched = self.dispatcher.dispatch(tokens, weights, chosen, rows)
        # While the tokens are on their way
        if overlap_fn is not None and self.overlap:
            overlap_fn()
        arrived = dispatched.arrive()
        outputs = self.forward(arrived, dispatched.weights, dispatched.chosen, dispatched.rows)
        y = self.dispatcher.combine(outputs, dispatched)
        if y.shape != tokens.shape:
            message = f"{type(self.dispatcher).__name__}.combine returns {tuple(y.shape)} for tokens"
            raise ForgeError(f"{message} {tuple(tokens.shape)}; it returns one sum for each token, in their order")
        return y


class SendChoices(torch.autograd.Function):
    """Sends weights (…, K) and expert numbers (…, K) in one collective.

    The numbers' bits are viewed as floats, without conversion. Backward: gradients of the weights only.

    Args:
        weights: float32 or float64.
        chosen: int64.
        there: sends a tensor (…, 2 K) of the weights' dtype.
        back: sends the gradient of the weights.
    """

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, chosen: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        ctx.back = back
        # As wide as the weights, whose dtype the bits borrow
        integers = torch.int64 if weights.dtype == torch.float64 else torch.int32
        arrived = there(torch.cat([weights, chosen.to(integers).view(weights.dtype)], 1))
        weights, bits = (part.contiguous() for part in arrived.chunk(2, 1))
        chosen = bits.view(integers).long()
        ctx.mark_non_differentiable(chosen)
        return weights, chosen

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None, None, None]:
        return ctx.back(grad), None, None, None


def relative(chosen: Tensor, first: Tensor | int, experts: int) -> Tensor:
    """Returns choices as numbers relative to an expert; -1 for those outside of the `experts` from there on."""
    local = chosen - first
    return local.where((local >= 0) & (local < experts), -1)


def tally(chosen: Tensor, groups: int) -> Tensor:
    """Counts (G,) of how often each group is chosen in (T, K)."""
    return (chosen.unsqueeze(-1) == torch.arange(groups, device=chosen.device)).sum((0, 1))


def widened(weights: Tensor) -> Tensor:
    """Returns weights in 32 bits at least, as expert numbers travel in the same tensor."""
    return weights.to(torch.promote_types(weights.dtype, torch.float32))
