"""Single reductions over a vocabulary whose logits may be split over ranks, for custom losses and evaluations.

The conventions of `forge_core.vocab_parallel` apply; it has the cross-entropy and the parts that both are built from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge_core.vocab_parallel import combine_gathered, combine_logsumexp, local_labels

if TYPE_CHECKING:
    from forge_core.contracts.model import VocabShard


def vocab_logsumexp(logits: Tensor, shard: VocabShard | None) -> Tensor:
    """Logsumexp over the whole vocabulary: (…, V), or this rank's slice of V, -> (…). One collective."""
    return _LogSumExp.apply(logits, shard)


def vocab_gather(logits: Tensor, labels: Tensor, shard: VocabShard | None) -> Tensor:
    """The logit of each position's label: (…, V), or this rank's slice of V, and labels (…) in [0, V) -> (…).

    One collective; the gradient reaches the rank that holds the label.
    """
    return _Gather.apply(logits, labels, shard)


class _LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, shard: VocabShard | None) -> Tensor:
        result = combine_logsumexp(logits.logsumexp(-1), shard)
        ctx.save_for_backward(logits, result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, result = ctx.saved_tensors
        # The softmax over the whole vocabulary: `result` is combined over all ranks
        return (logits - result.unsqueeze(-1)).exp_().mul_(grad.unsqueeze(-1)), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, shard: VocabShard | None) -> Tensor:
        index, inside = local_labels(labels, shard)
        ctx.save_for_backward(index, inside)
        ctx.shape = logits.shape
        return combine_gathered(logits.gather(-1, index.unsqueeze(-1)).squeeze(-1), inside, shard)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        index, inside = ctx.saved_tensors
        zeros = grad.new_zeros(ctx.shape)
        # A label outside of this rank's slice has a placeholder index, which gets no gradient
        return zeros.scatter_(-1, index.unsqueeze(-1), grad.where(inside, 0).unsqueeze(-1)), None, None
