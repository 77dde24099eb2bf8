"""Differentiable reductions over a vocabulary whose logits may be split over the ranks of a group.

Every rank of the group holds the logits of the same positions for its own slice of the vocabulary, computes the same
loss from them, and so receives the same incoming gradient: no backward pass here communicates. The gradient with
respect to hidden states goes through this rank's slice only; whatever made the hidden states whole on the group adds
the ranks' parts up.

`shard=None` means that the logits cover the whole vocabulary. Sums run in the dtype of the logits, so give them in
float32 or wider; `vocab_cross_entropy` widens by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from forge_core.contracts.model import VocabShard


def vocab_logsumexp(logits: Tensor, shard: VocabShard | None) -> Tensor:
    """log Σ exp over the whole vocabulary: (…, V), or this rank's slice of V, -> (…). One collective."""
    return _LogSumExp.apply(logits, shard)


def vocab_gather(logits: Tensor, labels: Tensor, shard: VocabShard | None) -> Tensor:
    """The logit of each position's label: (…, V), or this rank's slice of V, and labels (…) in [0, V) -> (…).

    One collective; the gradient reaches the rank that holds the label.
    """
    return _Gather.apply(logits, labels, shard)


def vocab_cross_entropy(logits: Tensor, labels: Tensor, shard: VocabShard | None) -> tuple[Tensor, Tensor]:
    """`vocab_logsumexp` less `vocab_gather`, and `vocab_logsumexp`: both (…), float32 (float64 for float64 logits).

    Equal to the two calls, in less time and memory: it keeps the logits in their own dtype and makes their gradient
    in one pass.
    """
    return _CrossEntropy.apply(logits, labels, shard)


def vocab_mean(logits: Tensor, shard: VocabShard | None) -> Tensor:
    """The mean logit of the whole vocabulary: (…, V), or this rank's slice of V, -> (…), float32 or wider.

    One collective.
    """
    return _Mean.apply(logits, shard)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a loss over values of `dtype` is computed: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def combine_logsumexp(local: Tensor, shard: VocabShard | None) -> Tensor:
    """logsumexp over the whole vocabulary from that over each rank's slice. Not differentiable."""
    if shard is None:
        return local
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size(shard.group))]
    dist.all_gather(parts, local.contiguous(), group=shard.group)
    return torch.stack(parts).logsumexp(0)


def combine_mean(total: Tensor, size: int, shard: VocabShard | None) -> tuple[Tensor, Tensor]:
    """The mean over the whole vocabulary, and its size (), from the sum over each rank's slice of `size`. Not
    differentiable."""
    sums = torch.cat([total.flatten(), total.new_full((1,), size)])
    if shard is not None:
        dist.all_reduce(sums, group=shard.group)
    return sums[:-1].view_as(total) / sums[-1], sums[-1]


def combine_gathered(local: Tensor, inside: Tensor, shard: VocabShard | None) -> Tensor:
    """Values gathered at `local_labels`, from the rank that holds each. Not differentiable."""
    if shard is None:
        return local
    gathered = local.where(inside, 0)
    dist.all_reduce(gathered, group=shard.group)
    return gathered


def local_labels(labels: Tensor, shard: VocabShard | None) -> tuple[Tensor, Tensor]:
    """Labels as indices into this rank's slice, and whether they lie in it; where they do not, the index is 0."""
    if shard is None:
        return labels, torch.ones_like(labels, dtype=torch.bool)
    index = labels - shard.offset
    inside = (index >= 0) & (index < shard.size)
    return index.where(inside, 0), inside


def subtract_at(values: Tensor, index: Tensor, amount: Tensor) -> None:
    """values[…, index] -= amount, in place and in a fixed order: `values` (…, V), `index` and `amount` (…)."""
    index = index.unsqueeze(-1)
    values.scatter_(-1, index, values.gather(-1, index) - amount.unsqueeze(-1))


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
        return zeros.scatter_(-1, index.unsqueeze(-1), grad.where(inside, 0).unsqueeze(-1)), None, None


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, shard: VocabShard | None) -> Tensor:
        total = logits.sum(-1, dtype=accumulation_dtype(logits.dtype))
        mean, size = combine_mean(total, logits.shape[-1], shard)
        ctx.save_for_backward(size)
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        return mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (size,) = ctx.saved_tensors
        return (grad / size).to(ctx.dtype).unsqueeze(-1).expand(ctx.shape), None


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, shard: VocabShard | None) -> tuple[Tensor, Tensor]:
        index, inside = local_labels(labels, shard)
        wide = logits.to(accumulation_dtype(logits.dtype))
        logsumexp = combine_logsumexp(wide.logsumexp(-1), shard)
        target = combine_gathered(wide.gather(-1, index.unsqueeze(-1)).squeeze(-1), inside, shard)
        ctx.save_for_backward(logits, index, inside, logsumexp)
        return logsumexp - target, logsumexp

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_logsumexp: Tensor) -> tuple[Tensor, None, None]:
        logits, index, inside, logsumexp = ctx.saved_tensors
        gradient = logits.to(logsumexp.dtype, copy=True)  # widened first: subtracting across dtypes takes twice as long
        gradient.sub_(logsumexp.unsqueeze(-1)).exp_().mul_((grad + grad_logsumexp).unsqueeze(-1))
        subtract_at(gradient, index, grad.where(inside, 0))
        return gradient.to(logits.dtype), None, None
