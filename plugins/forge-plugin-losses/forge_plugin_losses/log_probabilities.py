"""Log-probabilities of labels, chunk by chunk, for losses over whole answers such as DPO.

The forward pass keeps one number of each position, its log-normaliser; the backward pass computes the logits of a chunk
again. So no logits outlive a chunk, whatever the loss makes of the log-probabilities afterwards. Shape suffixes as in
`chunked`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge_core.contracts.data import IGNORED_LABEL
from forge_core.vocab_parallel import (
    accumulation_dtype,
    combine_gathered,
    combine_logsumexp,
    local_labels,
    subtract_at,
)
from forge_plugin_losses.projections import is_linear, projection_of
from forge_plugin_losses.vocabulary_chunks import default_chunk_tokens, learned_positions
from forge_plugin_losses.workspace import Workspace

if TYPE_CHECKING:
    from forge_core.contracts.model import Head


def log_probabilities(
    head: Head, hidden: Tensor, labels: Tensor, *, chunk_tokens: int = 0, workspace: Workspace | None = None
) -> Tensor:
    """Compute log p of each label, without holding all logits at once, forward or backward.

    Works with any head, and with a vocabulary that is split over ranks; differentiable by the hidden states and the
    weights of the head. As with every loss, the gradient of the hidden states goes through this rank's slice of the
    vocabulary. Backward it costs one product with the head more than an ordinary loss.

    Args:
        head: of the model.
        hidden: (B, S, D), its final hidden states.
        labels: (B, S) int64; -100 where there is none.
        chunk_tokens: positions whose logits exist at a time; 0: as many as `chunked_cross_entropy` takes.
        workspace: memory that successive calls share; None: its own.

    Returns:
        (B, S) in nats, float32 (float64 for hidden states in float64); 0 where there is no label.
    """
    labels_T, hidden_TD = labels.flatten(), hidden.flatten(0, -2)
    learned_L = learned_positions(labels_T)
    if learned_L is not None:
        hidden_TD, labels_L = hidden_TD.index_select(0, learned_L), labels_T[learned_L]
    else:
        labels_L = labels_T
    # Around all chunks, so that weights are gathered, and their gradient is reduced, once
    with head.whole(hidden.dtype) as weights:
        rows = chunk_tokens or default_chunk_tokens(hidden.device, max(map(len, weights), default=1))
        task = Task(head, weights, labels_L, rows, workspace or Workspace())
        values = _LogProbabilities.apply(task, hidden_TD, *weights)
    if learned_L is not None:
        values = values.new_zeros(labels_T.shape).index_copy(0, learned_L, values)
    return values.view_as(labels)


@frozen
class Task:
    """One call; a `forge_plugin_losses.projections.Task`."""

    head: Head
    weights: Sequence[Tensor]
    labels_T: Tensor
    chunk: int
    workspace: Workspace

    def chunks(self, length: int) -> Iterator[slice]:
        """Yields the ranges of up to `chunk` positions that cover `length`; the last may be shorter."""
        return (slice(start, min(start + self.chunk, length)) for start in range(0, length, self.chunk))


class _LogProbabilities(torch.autograd.Function):
    """(task, hidden_TD, *weights) -> log p of the labels (T,), 0 where there is none."""

    @staticmethod
    def forward(ctx: Any, task: Task, hidden_TD: Tensor, *weights: Tensor) -> Tensor:
        dtype = accumulation_dtype(hidden_TD.dtype)
        values_T = hidden_TD.new_empty(len(hidden_TD), dtype=dtype)
        logsumexp_T = torch.empty_like(values_T)
        shard = task.head.vocab_shard
        projection = projection_of(task, hidden_TD, [False] * (1 + len(weights)))
        for rows in task.chunks(len(hidden_TD)):
            wide_CV = task.workspace.widened("wide", projection.logits(rows))
            labels_C = task.labels_T[rows]
            valid_C = labels_C != IGNORED_LABEL
            # Any label will do where there is none, as its value is masked
            index_C, inside_C = local_labels(labels_C.where(valid_C, 0), shard)
            own_C = wide_CV.gather(-1, index_C[:, None])[:, 0]
            # Collectives where the vocabulary is split: all of its ranks reach them in one order
            logsumexp_C = combine_logsumexp(_logsumexp_(wide_CV), shard)
            target_C = combine_gathered(own_C, inside_C, shard)
            values_T[rows] = (target_C - logsumexp_C).where(valid_C, 0)
            logsumexp_T[rows] = logsumexp_C
        ctx.task = task
        ctx.save_for_backward(hidden_TD, logsumexp_T, *weights)
        return values_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor | None, ...]:
        task: Task = ctx.task
        hidden_TD, logsumexp_T, *weights = ctx.saved_tensors
        with _weights_again(task, weights, hidden_TD.dtype) as again:
            task = Task(task.head, again, task.labels_T, task.chunk, task.workspace)
            projection = projection_of(task, hidden_TD, ctx.needs_input_grad[1:])
            for rows in task.chunks(len(hidden_TD)):
                gradient_CV = _gradient(task, projection.logits(rows), logsumexp_T[rows], grad_T[rows], rows)
                projection.accumulate(rows, gradient_CV)
            gradients = projection.gradients()
        pairs = zip(gradients, (hidden_TD, *weights), strict=True)
        return None, *(None if gradient is None else gradient.to(tensor.dtype) for gradient, tensor in pairs)


def _logsumexp_(values_CV: Tensor) -> Tensor:
    """`values_CV.logsumexp(-1)`, (C,), in place, where torch's takes as much memory again."""
    largest_C = values_CV.amax(-1)
    shift_C = largest_C.where(largest_C.isfinite(), 0)  # where all values are -inf, so is the result
    return values_CV.sub_(shift_C[:, None]).exp_().sum(-1).log_() + shift_C


@contextmanager
def _weights_again(task: Task, saved: Sequence[Tensor], dtype: torch.dtype) -> Iterator[Sequence[Tensor]]:
    """The weights by which the logits are differentiated in the backward pass."""
    # A linear head is written out with the saved weights. Any other one computes its logits itself, and needs a graph
    # from weights that it holds at this moment, which have the same values. A backward pass has turned gradients off.
    if is_linear(task.head):
        yield saved
    else:
        with torch.enable_grad(), task.head.whole(dtype) as weights:
            yield weights


def _gradient(task: Task, logits_CV: Tensor, logsumexp_C: Tensor, grad_C: Tensor, rows: slice) -> Tensor:
    """(C, V): gradient by the logits, grad (onehot - softmax), in memory that the next chunk overwrites."""
    labels_C = task.labels_T[rows]
    valid_C = labels_C != IGNORED_LABEL
    index_C, inside_C = local_labels(labels_C.where(valid_C, 0), task.head.vocab_shard)
    grad_C = grad_C.where(valid_C, 0)
    gradient_CV = task.workspace.widened("wide", logits_CV)
    # Labels apart: a one-hot matrix would be as large as the logits
    gradient_CV.sub_(logsumexp_C[:, None]).exp_().mul_(-grad_C[:, None])
    subtract_at(gradient_CV, index_C, -grad_C.where(inside_C, 0))
    return gradient_CV
