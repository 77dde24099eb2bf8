"""Cross-entropy and its gradient, chunk by chunk.

For a position with label y, softmax p and log-normaliser z, the objective is z - l_y + w z², and its gradient with
respect to the logits l is (1 + 2 w z) p - onehot(y). It is made in the forward pass, multiplied into the gradients of
the hidden states and of the head, and forgotten; the backward pass only scales those two.

Shape suffixes: T positions of a micro-batch, C positions of a chunk, D model width, V vocabulary (this rank's slice of
it where it is split).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from attrs import frozen
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge_core.cross_entropy import loss_output
from forge_core.modules import LinearHead
from forge_core.protocols import IGNORED_LABEL
from forge_core.vocab_parallel import (
    accumulation_dtype,
    combine_gathered,
    combine_logsumexp,
    local_labels,
    subtract_at,
)

if TYPE_CHECKING:
    from forge_core.engine.auxiliary import Auxiliary
    from forge_core.protocols import Batch, Head, LossFunction, LossOutput


def default_chunk_tokens(device: torch.device) -> int:
    """Positions a chunk. Each chunk costs one pass over the gradient of the head, whatever the vocabulary.

    On the CPU 512 is within 5 % of the fastest (README, "Measurements"). An accelerator's products are so much faster
    than its memory that this pass weighs eight times as much: 4096, by arithmetic and not by measurement.
    """
    return 512 if device.type == "cpu" else 4096


def chunked_loss(chunk_tokens: int, z_loss: float, auxiliary: Auxiliary | None) -> LossFunction:
    """The loss `chunked_cross_entropy`. `auxiliary`: where a z-loss (Σ z²) is logged, unweighted; needed if w > 0."""
    workspace = Workspace()

    def loss(head: Head, hidden: Tensor, batch: Batch) -> LossOutput:
        labels = batch["labels"]
        with head.whole(hidden.dtype) as weights:
            task = _Task(head, weights, labels.flatten(), chunk_tokens, z_loss, workspace, torch.is_grad_enabled())
            objective, losses_T, squares = _Chunked.apply(task, hidden.flatten(0, -2), *weights)
        if auxiliary is not None and z_loss:
            auxiliary.metric("loss/z_loss", squares, unit="token")
        return loss_output(objective, losses_T.view_as(labels), labels != IGNORED_LABEL)

    return loss


class Workspace:
    """Memory for what does not outlive a call.

    On the CPU it is kept from call to call: the system takes longer to supply fresh pages than the loss to fill them.
    The allocators of other devices do that by themselves.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, torch.dtype], Tensor] = {}

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised tensor, good until `name` is asked for again."""
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        size = math.prod(shape)
        kept = self._kept.get((name, dtype))
        if kept is None or kept.numel() < size:
            with torch.inference_mode(False):
                kept = self._kept[name, dtype] = torch.empty(size, dtype=dtype)
        return kept[:size].view(shape)


@frozen
class _Task:
    """One call of the loss, but for the tensors with respect to which it is differentiated."""

    head: Head
    weights: Sequence[Tensor]
    labels_T: Tensor
    chunk: int
    z_loss: float
    workspace: Workspace
    differentiate: bool

    def chunks(self) -> Iterator[slice]:
        length = len(self.labels_T)
        return (slice(start, min(start + self.chunk, length)) for start in range(0, length, self.chunk))


class _Chunked(torch.autograd.Function):
    """(task, hidden_TD, *weights) -> objective (), cross-entropies (T,), Σ z² (). Only the first is differentiable."""

    @staticmethod
    def forward(ctx: Any, task: _Task, hidden_TD: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        needs = [task.differentiate and need for need in ctx.needs_input_grad[1:]]
        linear = getattr(task.head.logits, "__func__", None) is LinearHead.logits
        projection = (_Linear if linear else _Graph)(task, hidden_TD, needs)
        losses_T, logsumexp_T = _sweep(task, projection, hidden_TD)
        squares = logsumexp_T.square().sum()
        ctx.mark_non_differentiable(losses_T, squares)
        ctx.save_for_backward(*projection.gradients())
        ctx.dtypes = [tensor.dtype for tensor in (hidden_TD, *weights)]
        return losses_T.sum() + task.z_loss * squares, losses_T, squares

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return None, *(None if saved is None else _scaled(saved, grad, dtype) for saved, dtype in pairs)


def _scaled(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`gradient * scale`, rounded once, to `dtype`."""
    return torch.mul(gradient, scale, out=torch.empty_like(gradient, dtype=dtype))


def _sweep(task: _Task, projection: _Projection, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropies and log-normalisers (T,), 0 where ignored; the gradients gather in `projection`."""
    dtype = accumulation_dtype(hidden_TD.dtype)
    losses_T, logsumexp_T = hidden_TD.new_empty(2, len(hidden_TD), dtype=dtype)
    for rows in task.chunks():
        chunk = _normalise(task, projection.logits(rows), task.labels_T[rows])
        losses_T[rows] = chunk.losses_C.where(chunk.valid_C, 0)
        logsumexp_T[rows] = chunk.logsumexp_C.where(chunk.valid_C, 0)
        if task.differentiate:
            projection.accumulate(rows, chunk.gradient_CV(task.z_loss))
    return losses_T, logsumexp_T


@frozen
class _Chunk:
    losses_C: Tensor
    logsumexp_C: Tensor
    valid_C: Tensor
    index_C: Tensor
    """Labels as indices into V, and below whether they lie there."""
    inside_C: Tensor
    softmax_CV: Tensor
    """Over this rank's V; `share_C` is the part of all probability that falls there."""
    share_C: Tensor

    def gradient_CV(self, z_loss: float) -> Tensor:
        """Gradient of the objective with respect to the logits; takes the place of the softmax."""
        scale_C = self.share_C * (1 + 2 * z_loss * self.logsumexp_C)
        self.softmax_CV.mul_(scale_C.where(self.valid_C, 0)[:, None])
        subtract_at(self.softmax_CV, self.index_C, (self.valid_C & self.inside_C).to(scale_C.dtype))
        return self.softmax_CV


def _normalise(task: _Task, logits_CV: Tensor, labels_C: Tensor) -> _Chunk:
    wide_CV = _widened(task.workspace, logits_CV)
    softmax_CV = task.workspace.empty("softmax", wide_CV.shape, wide_CV.dtype, wide_CV.device)
    torch.softmax(wide_CV, -1, out=softmax_CV)
    # The softmax of the largest logit is 1 / Σ exp(l - max); logsumexp would take all the exponentials once more.
    local_C = wide_CV.amax(-1) - softmax_CV.amax(-1).log_()
    shard = task.head.vocab_shard
    logsumexp_C = combine_logsumexp(local_C, shard)
    valid_C = labels_C != IGNORED_LABEL
    index_C, inside_C = local_labels(labels_C.where(valid_C, 0), shard)
    target_C = combine_gathered(wide_CV.gather(-1, index_C[:, None])[:, 0], inside_C, shard)
    share_C = (local_C - logsumexp_C).exp_()
    return _Chunk(logsumexp_C - target_C, logsumexp_C, valid_C, index_C, inside_C, softmax_CV, share_C)


def _widened(workspace: Workspace, logits_CV: Tensor) -> Tensor:
    dtype = accumulation_dtype(logits_CV.dtype)
    if dtype == logits_CV.dtype:
        return logits_CV
    return workspace.empty("wide", logits_CV.shape, dtype, logits_CV.device).copy_(logits_CV)


class _Projection(Protocol):
    """A head, and the gradients that gather in it."""

    def __init__(self, task: _Task, hidden_TD: Tensor, needs: Sequence[bool]) -> None:
        """Args: `needs`, whether the gradient of hidden_TD, and of each weight, is needed."""

    def logits(self, rows: slice) -> Tensor:
        """Logits (C, V) of the positions `rows`."""
        ...

    def accumulate(self, rows: slice, gradient_CV: Tensor) -> None:
        """Take in the gradient with respect to the logits last given, which are those of `rows`."""

    def gradients(self) -> Sequence[Tensor | None]:
        """Of hidden_TD, in its dtype, and of each weight, in float32 or wider; None where not needed."""
        ...


class _Linear(_Projection):
    """h Wᵀ + b written out: three matrix products a chunk, all into memory that is there."""

    def __init__(self, task: _Task, hidden_TD: Tensor, needs: Sequence[bool]) -> None:
        self._hidden_TD = hidden_TD
        self._weight_VD, *bias = task.weights
        self._bias_V = bias[0] if bias else None
        self._workspace = task.workspace
        gradients = _zeros_for(task.weights, needs[1:])
        self._to_hidden_TD = torch.empty_like(hidden_TD) if needs[0] else None
        self._to_weight_VD, self._to_bias_V = (*gradients, None)[:2]
        self._gradients = [self._to_hidden_TD, *gradients]

    def logits(self, rows: slice) -> Tensor:
        hidden_CD = self._hidden_TD[rows]
        out = self._scratch("logits", (len(hidden_CD), len(self._weight_VD)))
        if self._bias_V is None:
            return torch.mm(hidden_CD, self._weight_VD.t(), out=out)
        return torch.addmm(self._bias_V, hidden_CD, self._weight_VD.t(), out=out)

    def accumulate(self, rows: slice, gradient_CV: Tensor) -> None:
        if self._to_bias_V is not None:
            self._to_bias_V += gradient_CV.sum(0)
        if gradient_CV.dtype != self._hidden_TD.dtype:
            gradient_CV = self._scratch("logits", gradient_CV.shape).copy_(gradient_CV)
        if self._to_hidden_TD is not None:
            torch.mm(gradient_CV, self._weight_VD, out=self._to_hidden_TD[rows])
        if self._to_weight_VD is not None:
            self._accumulate_weight(self._to_weight_VD, gradient_CV.t(), self._hidden_TD[rows])

    def _accumulate_weight(self, total_VD: Tensor, gradient_VC: Tensor, hidden_CD: Tensor) -> None:
        if total_VD.dtype == hidden_CD.dtype:
            total_VD.addmm_(gradient_VC, hidden_CD)
        else:
            total_VD += torch.mm(gradient_VC, hidden_CD, out=self._scratch("product", total_VD.shape))

    def _scratch(self, name: str, shape: Sequence[int]) -> Tensor:
        return self._workspace.empty(name, shape, self._hidden_TD.dtype, self._hidden_TD.device)

    def gradients(self) -> Sequence[Tensor | None]:
        return self._gradients


class _Graph(_Projection):
    """Any head: its own `logits`, differentiated by autograd a chunk at a time."""

    def __init__(self, task: _Task, hidden_TD: Tensor, needs: Sequence[bool]) -> None:
        self._head, self._weights, self._hidden_TD, self._needs = task.head, task.weights, hidden_TD, needs
        self._to_hidden_TD = torch.empty_like(hidden_TD) if needs[0] else None
        self._to_weights = _zeros_for(task.weights, needs[1:])

    def logits(self, rows: slice) -> Tensor:
        with torch.set_grad_enabled(any(self._needs)):
            self._hidden_CD = self._hidden_TD[rows].detach().requires_grad_(self._needs[0])
            self._logits_CV = self._head.logits(self._hidden_CD)
        return self._logits_CV.detach()

    def accumulate(self, rows: slice, gradient_CV: Tensor) -> None:
        inputs = (self._hidden_CD, *self._weights)
        needed = [tensor for tensor, need in zip(inputs, self._needs, strict=True) if need]
        gradients = iter(torch.autograd.grad(self._logits_CV, needed, gradient_CV.to(self._logits_CV.dtype)))
        if self._to_hidden_TD is not None:
            self._to_hidden_TD[rows] = next(gradients)
        for total in self._to_weights:
            if total is not None:
                total += next(gradients)

    def gradients(self) -> Sequence[Tensor | None]:
        return [self._to_hidden_TD, *self._to_weights]


def _zeros_for(weights: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor | None]:
    return [
        torch.zeros_like(weight, dtype=accumulation_dtype(weight.dtype)) if need else None
        for weight, need in zip(weights, needs, strict=True)
    ]
