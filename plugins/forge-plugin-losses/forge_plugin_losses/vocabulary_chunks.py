"""Losses over a vocabulary, chunk by chunk.

For a position with label y, softmax p and log-normaliser z, the objective is (1 - s) (z - l_y) + s (z - mean l) + w z²
with label smoothing s and z-loss w, and its gradient with respect to the logits l of V words is
(1 + 2 w z) p - (1 - s) onehot(y) - s/V. The forward pass computes it, multiplies it into the gradients of the hidden
states and of the head, and frees it; the backward pass only scales those two. Other objectives (`Objective`) are
computed in the same way.

Shape suffixes: T positions of a micro-batch, L of them with a label, C positions of a chunk, D model width, V
vocabulary (this rank's slice of it where it is split).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge_core.contracts.data import IGNORED_LABEL
from forge_core.losses import loss_output
from forge_core.vocab_parallel import accumulation_dtype
from forge_kit.torch_internals import FakeTensor
from forge_plugin_losses.objectives import CrossEntropyObjective, Objective
from forge_plugin_losses.projections import Projection, projection_of
from forge_plugin_losses.workspace import Workspace

if TYPE_CHECKING:
    from forge_core.auxiliary import Auxiliary
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Head
    from forge_core.contracts.runtime import LossFunction, LossOutput

WORTH_LEAVING_OUT = 0.9
"""Positions without a label are left out if those with one are less than this share."""
MakeObjective = Callable[["Head", "Batch", Workspace], Objective]
"""(head, batch, workspace) -> the objective of this micro-batch."""


LOGITS_BYTES = {"cpu": 1 << 28}
"""By type of device, what the float32 logits of one chunk take at most; elsewhere `LOGITS_BYTES_ELSEWHERE`."""
LOGITS_BYTES_ELSEWHERE = 1 << 30
FEWEST_CHUNK_TOKENS = 16


def most_chunk_tokens(device: torch.device) -> int:
    """Positions per chunk, for vocabularies whose logits fit into the bytes of a chunk.

    Each chunk costs one pass over the gradient of the head, for every size of the vocabulary. On the CPU 512 is within
    5 % of the fastest (README, "Measurements"). Relative to its products, an accelerator's memory is slower, so that
    this pass weighs eight times as much: 4096, by arithmetic and not by measurement.
    """
    return 512 if device.type == "cpu" else 4096


def default_chunk_tokens(device: torch.device, vocab_size: int) -> int:
    """Positions per chunk for a vocabulary of that size (this rank's slice of it): fewer, the larger it is."""
    most_bytes = LOGITS_BYTES.get(device.type, LOGITS_BYTES_ELSEWHERE)
    # 4 bytes a logit: the softmax is computed in float32
    return max(FEWEST_CHUNK_TOKENS, min(most_chunk_tokens(device), most_bytes // (4 * vocab_size)))


def chunked_loss(
    chunk_tokens: int, auxiliary: Auxiliary | None, *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> LossFunction:
    """Returns the loss `chunked_cross_entropy`; `auxiliary`, if any, logs smoothing and z-loss, unweighted."""

    def objective(head: Head, batch: Batch, workspace: Workspace) -> Objective:
        return CrossEntropyObjective(
            labels_T=batch["labels"].flatten(),
            shard=head.vocab_shard,
            workspace=workspace,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
        )

    return chunked(objective, chunk_tokens, auxiliary, learned_only=True)


def chunked(
    make: MakeObjective, chunk_tokens: int, auxiliary: Auxiliary | None, learned_only: bool = False
) -> LossFunction:
    """Returns the loss of an objective, chunk by chunk; `auxiliary`, if any, logs its metrics.

    Args:
        make: makes the objective of a micro-batch.
        chunk_tokens: positions per chunk; 0: see `default_chunk_tokens`.
        auxiliary: receives the metrics of the objective.
        learned_only: whether the objective reads nothing of the batch but its labels, so that it can be computed at
            positions with a label alone.
    """
    workspace = Workspace()

    def loss(head: Head, hidden: Tensor, batch: Batch) -> LossOutput:
        labels = batch["labels"]
        hidden_TD, learned_L = hidden.flatten(0, -2), learned_positions(labels.flatten()) if learned_only else None
        if learned_L is not None:
            hidden_TD = hidden_TD.index_select(0, learned_L)
            batch = {**batch, "labels": labels.flatten()[learned_L]}
        objective = make(head, batch, workspace)
        metrics: dict[str, Tensor] = {}
        # Around all chunks, so that weights are gathered, and their gradient is reduced, once
        with head.whole(hidden.dtype) as weights:
            # The rows of the largest weight are the vocabulary: of a linear head, and of one in parts at least.
            rows = chunk_tokens or default_chunk_tokens(hidden.device, max(map(len, weights), default=1))
            task = Task(head, weights, objective, rows, workspace, torch.is_grad_enabled(), metrics)
            total, losses_T = _Chunked.apply(task, hidden_TD, *weights)
        if learned_L is not None:
            losses_T = losses_T.new_zeros(labels.numel()).index_copy_(0, learned_L, losses_T)
        if auxiliary is not None:
            for name, value in metrics.items():
                auxiliary.metric(name, value, unit="token")
        return loss_output(total, losses_T.view_as(labels), labels != IGNORED_LABEL)

    return loss


def learned_positions(labels_T: Tensor) -> Tensor | None:
    """(L,): the positions with a label, if leaving out the others saves work; None: take all."""
    # Answers of a chat and texts beside images are often a minority. On an accelerator their number would have to be
    # waited for, and a planned step has no labels.
    if labels_T.device.type != "cpu" or isinstance(labels_T, FakeTensor):
        return None
    learned_L = (labels_T != IGNORED_LABEL).nonzero()[:, 0]
    return learned_L if 0 < len(learned_L) < WORTH_LEAVING_OUT * len(labels_T) else None


@frozen
class Task:
    """One call of the loss, without the tensors that it is differentiated by."""

    head: Head
    weights: Sequence[Tensor]
    objective: Objective
    chunk: int
    workspace: Workspace
    differentiate: bool
    metrics: dict[str, Tensor]
    """Metrics of the objective, summed over the chunks; filled by the forward pass."""

    def chunks(self, length: int) -> Iterator[slice]:
        """Yields the ranges of up to `chunk` positions that cover `length`; the last may be shorter."""
        return (slice(start, min(start + self.chunk, length)) for start in range(0, length, self.chunk))


class _Chunked(torch.autograd.Function):
    """(task, hidden_TD, *weights) -> objective (), reported losses (T,). Only the first is differentiable."""

    @staticmethod
    def forward(ctx: Any, task: Task, hidden_TD: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        # Under `no_grad` autograd still reports needed gradients, and an evaluation must not pay for them.
        needs = [task.differentiate and need for need in ctx.needs_input_grad[1:]]
        projection = projection_of(task, hidden_TD, needs)
        total, losses_T = _sweep(task, projection, hidden_TD)
        ctx.mark_non_differentiable(losses_T)
        # The gradients exist already, for an objective with the gradient 1: nothing of the vocabulary's size is saved
        ctx.save_for_backward(*projection.gradients())
        ctx.dtypes = [tensor.dtype for tensor in (hidden_TD, *weights)]
        return total, losses_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return None, *(None if saved is None else _scaled(saved, grad, dtype) for saved, dtype in pairs)


def _scaled(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `gradient * scale` in `dtype`, rounded once."""
    return torch.mul(gradient, scale, out=torch.empty_like(gradient, dtype=dtype))


def _sweep(task: Task, projection: Projection, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the objective () and the reported losses (T,); gradients accumulate in `projection`."""
    dtype = accumulation_dtype(hidden_TD.dtype)
    total, losses_T = hidden_TD.new_zeros((), dtype=dtype), hidden_TD.new_empty(len(hidden_TD), dtype=dtype)
    # The gradient of a chunk is made right after its logits, while they are in the cache: no logits outlive a chunk.
    for rows in task.chunks(len(hidden_TD)):
        chunk = task.objective.chunk(projection.logits(rows), rows)
        total += chunk.objective
        losses_T[rows] = chunk.losses_C
        _add(task.metrics, chunk.metrics)
        if task.differentiate:
            projection.accumulate(rows, chunk.gradient_CV())
    return total, losses_T


def _add(totals: dict[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        totals[name] = totals[name] + value if name in totals else value
