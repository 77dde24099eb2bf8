"""Differentiable reductions over a vocabulary whose logits may be split over the ranks of a group.

Every rank of the group holds the logits of the same positions for its own slice of the vocabulary (`shard`; None: the
whole), computes the same loss from them, and so receives the same incoming gradient: no backward pass here
communicates. The gradient with respect to hidden states goes through this rank's slice only; the layer that made the
hidden states whole on the group sums the ranks' parts. Sums run in the dtype of the logits, so pass them in float32 or
wider; `vocab_cross_entropy` and `vocab_mean` widen by themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from forge_core.contracts.model import VocabShard


def vocab_cross_entropy(logits: Tensor, labels: Tensor, shard: VocabShard | None) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each position with its label, and logsumexp: both (…), float32 (float64 for float64 logits).

    `logits` (…, V), or this rank's slice of V, are kept in their own dtype; `labels` (…) are in [0, V).
    """
    return _CrossEntropy.apply(logits, labels, shard)


def vocab_mean(logits: Tensor, shard: VocabShard | None) -> Tensor:
    """The mean logit over the vocabulary: (…, V), or this rank's slice, -> (…), float32 or wider. One collective."""
    total = logits.sum(-1, dtype=accumulation_dtype(logits.dtype))
    mean, size = combine_mean(total.detach(), logits.shape[-1], shard)
    # The value of all ranks with the gradient of this one's slice; not by a difference of sums, NaN where one is inf.
    return mean.where(mean.isinf(), mean + (total - total.detach()) / size)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a loss over values of `dtype` is computed: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def combine_logsumexp(local: Tensor, shard: VocabShard | None) -> Tensor:
    """Combines each rank's logsumexp over its slice into one over the whole vocabulary. Not differentiable."""
    if shard is None:
        return local
    # One collective; with all_reduce it would take two, of the largest and then of the sums relative to it.
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size(shard.group))]
    dist.all_gather(parts, local.contiguous(), group=shard.group)
    return torch.stack(parts).logsumexp(0)


def combine_mean(total: Tensor, size: int, shard: VocabShard | None) -> tuple[Tensor, Tensor]:
    """The mean over the whole vocabulary, and its size (), from the sum over each slice. Not differentiable."""
    sums = torch.cat([total.flatten(), total.new_full((1,), size)])
    if shard is not None:
        dist.all_reduce(sums, group=shard.group)  # the size travels along: slices may be unequal
    return sums[:-1].view_as(total) / sums[-1], sums[-1]


def combine_gathered(local: Tensor, inside: Tensor, shard: VocabShard | None) -> Tensor:
    """Values gathered at `local_labels`, from the rank that holds each. Not differentiable."""
    if shard is None:
        return local
    gathered = local.where(inside, 0)
    dist.all_reduce(gathered, group=shard.group)  # exact: all ranks but one add zero
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


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, shard: VocabShard | None) -> tuple[Tensor, Tensor]:
        index, inside = local_labels(labels, shard)
        wide = logits.to(accumulation_dtype(logits.dtype))
        logsumexp = combine_logsumexp(wide.logsumexp(-1), shard)
        target = combine_gathered(wide.gather(-1, index.unsqueeze(-1)).squeeze(-1), inside, shard)
        # The narrow logits are saved, and widened again in the backward pass: half the memory between the two.
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
