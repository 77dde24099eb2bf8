"""Cross-entropy and its gradient, chunk by chunk.

For a position with label y, softmax p and log-normaliser z, the objective is z - l_y + w z², and its gradient with
respect to the logits l is (1 + 2 w z) p - onehot(y). It is made in the forward pass, multiplied into the gradients of
the hidden states and of the head, and forgotten; the backward pass only scales those two.

Shape suffixes: T positions of a micro-batch, C positions of a chunk, D model width, V vocabulary (this rank's slice of
it where it is split). Buffers of shape CV are made once: fresh memory costs more than computing what goes into it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import math

import torch
from attrs import frozen
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
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from forge_core.engine.auxiliary import Auxiliary
    from forge_core.protocols import Batch, Head, LossFunction, LossOutput

DEFAULT_CHUNK_TOKENS = {"cpu": 512, "cuda": 2048}


def chunked_loss(chunk_tokens: int, z_loss: float, auxiliary: Auxiliary | None) -> LossFunction:
    """The loss `chunked_cross_entropy`. `auxiliary`: where a z-loss is logged; None without one."""

    workspace = _Workspace()

    def loss(head: Head, hidden: Tensor, batch: Batch) -> LossOutput:
        labels = batch["labels"]
        chunk = chunk_tokens or DEFAULT_CHUNK_TOKENS.get(hidden.device.type, 1024)
        with head.whole(hidden.dtype) as weights:
            task = _Task(head, weights, labels.flatten(), chunk, z_loss, workspace, torch.is_grad_enabled())
            objective, losses, squares = _Chunked.apply(task, hidden.flatten(0, -2), *weights)
        if auxiliary is not None:
            auxiliary.metric("z_loss", squares, unit="token")
        return loss_output(objective, losses.view_as(labels), labels != IGNORED_LABEL)

    return loss


@frozen
class _Task:
    """What a call of the loss is about, but for the tensors that it differentiates."""

    head: Head
    weights: Sequence[Tensor]
    labels_T: Tensor
    chunk: int
    z_loss: float
    workspace: _Workspace
    differentiate: bool


class _Chunked(torch.autograd.Function):
    """(task, hidden_TD, *weights) -> objective (), cross-entropies (T,), Σ z² (); the first is differentiable."""

    @staticmethod
    def forward(ctx: Any, task: _Task, hidden_TD: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        needs = ctx.needs_input_grad[1:] if task.differentiate else [False] * (1 + len(weights))
        projection = _projection(task, hidden_TD, needs)
        losses_T, logsumexp_T = _sweep(task, projection, hidden_TD, any(needs))
        ctx.dtype = hidden_TD.dtype
        ctx.save_for_backward(*projection.gradients())
        ctx.mark_non_differentiable(losses_T)
        squares = logsumexp_T.square().sum()
        ctx.mark_non_differentiable(squares)
        return losses_T.sum() + task.z_loss * squares, losses_T, squares

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, *(None if saved is None else _scaled(saved, grad, ctx.dtype) for saved in ctx.saved_tensors)


def _scaled(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.mul(gradient, scale, out=torch.empty_like(gradient, dtype=dtype))


def _sweep(task: _Task, projection: _Projection, hidden_TD: Tensor, differentiate: bool) -> tuple[Tensor, Tensor]:
    """Cross-entropies and log-normalisers (T,), 0 at ignored positions; gradients gather in `projection`."""
    dtype = accumulation_dtype(hidden_TD.dtype)
    losses_T, logsumexp_T = hidden_TD.new_zeros(2, len(hidden_TD), dtype=dtype)
    softmax = _Softmax(task)
    for rows in _chunks(len(hidden_TD), task.chunk):
        losses_T[rows], logsumexp_T[rows] = softmax(projection.logits(rows), task.labels_T[rows])
        if differentiate:
            projection.accumulate(rows, softmax.gradient_CV())
    return losses_T, logsumexp_T


def _chunks(length: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, length)) for start in range(0, length, chunk))


class _Workspace:
    """Memory for values that do not outlive a call. On the CPU it is kept between calls: fresh pages cost more than
    what is computed in them. Elsewhere the allocator does that by itself."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, torch.dtype], Tensor] = {}

    def empty(self, name: str, shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialised tensor, good until `name` is asked for again; dtype and device of `like` unless given."""
        dtype = dtype or like.dtype
        if like.device.type != "cpu":
            return like.new_empty(shape, dtype=dtype)
        size = math.prod(shape)
        if (name, dtype) not in self._kept or self._kept[name, dtype].numel() < size:
            with torch.inference_mode(False):
                self._kept[name, dtype] = torch.empty(size, dtype=dtype)
        return self._kept[name, dtype][:size].view(shape)


class _Softmax:
    """Cross-entropy of one chunk after another, and its gradient, in reused memory."""

    def __init__(self, task: _Task) -> None:
        self._shard, self._z_loss = task.head.vocab_shard, task.z_loss
        self._workspace = task.workspace

    def __call__(self, logits_CV: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropies and log-normalisers (C,), 0 where the label is ignored."""
        wide_CV = self._widen(logits_CV)
        softmax_CV = self._workspace.empty("softmax", wide_CV.shape, wide_CV)
        torch.softmax(wide_CV, -1, out=softmax_CV)
        # The softmax of the largest logit is 1 / Σ exp(l - max). logsumexp would take all exponentials once more.
        local_C = wide_CV.amax(-1) - softmax_CV.amax(-1).log_()
        logsumexp_C = combine_logsumexp(local_C, self._shard)
        valid_C = labels_C != IGNORED_LABEL
        index_C, inside_C = local_labels(labels_C.where(valid_C, 0), self._shard)
        target_C = combine_gathered(wide_CV.gather(-1, index_C[:, None])[:, 0], inside_C, self._shard)
        self._chunk = softmax_CV, local_C - logsumexp_C, logsumexp_C, index_C, valid_C, inside_C
        return (logsumexp_C - target_C).where(valid_C, 0), logsumexp_C.where(valid_C, 0)

    def gradient_CV(self) -> Tensor:
        """Gradient of the last chunk's objective with respect to its logits; good until the next chunk."""
        softmax_CV, log_share_C, logsumexp_C, index_C, valid_C, inside_C = self._chunk
        scale_C = log_share_C.exp_() * (1 + 2 * self._z_loss * logsumexp_C)
        softmax_CV.mul_(scale_C.where(valid_C, 0)[:, None])
        subtract_at(softmax_CV, index_C, (valid_C & inside_C).to(softmax_CV.dtype))
        return softmax_CV

    def _widen(self, logits_CV: Tensor) -> Tensor:
        dtype = accumulation_dtype(logits_CV.dtype)
        if dtype == logits_CV.dtype:
            return logits_CV
        return self._workspace.empty("wide", logits_CV.shape, logits_CV, dtype).copy_(logits_CV)


class _Projection(Protocol):
    """A head, and the gradients that gather in it: of hidden_TD and of each weight, None where not needed."""

    def logits(self, rows: slice) -> Tensor:
        """Logits (C, V) of some positions."""

    def accumulate(self, rows: slice, gradient_CV: Tensor) -> None:
        """Take in the gradient with respect to the logits last given, which are those of `rows`."""

    def gradients(self) -> Sequence[Tensor | None]: ...


def _projection(task: _Task, hidden_TD: Tensor, needs: Sequence[bool]) -> _Projection:
    head = task.head
    linear = getattr(head.logits, "__func__", None) is LinearHead.logits
    return (_Linear if linear else _Graph)(task, hidden_TD, needs)


class _Linear:
    """h Wᵀ + b, written out: three matrix products a chunk, into memory that is made once."""

    def __init__(self, task: _Task, hidden_TD: Tensor, needs: Sequence[bool]) -> None:
        self._hidden_TD = hidden_TD
        self._weight_VD, *bias = task.weights
        self._bias_V = bias[0] if bias else None
        chunk = min(task.chunk, len(hidden_TD))
        self._logits_CV = task.workspace.empty("logits", (chunk, len(self._weight_VD)), hidden_TD)
        dtype = accumulation_dtype(hidden_TD.dtype)
        self._to_hidden_TD = torch.empty_like(hidden_TD) if needs[0] else None
        self._to_weight_VD = torch.zeros_like(self._weight_VD, dtype=dtype) if needs[1] else None
        narrow = dtype != hidden_TD.dtype
        self._product_VD = task.workspace.empty("product", self._weight_VD.shape, hidden_TD) if narrow else None
        self._to_bias_V = torch.zeros_like(bias[0], dtype=dtype) if bias and needs[2] else None

    def logits(self, rows: slice) -> Tensor:
        hidden_CD = self._hidden_TD[rows]
        out = self._logits_CV[: len(hidden_CD)]
        if self._bias_V is None:
            return torch.mm(hidden_CD, self._weight_VD.t(), out=out)
        return torch.addmm(self._bias_V, hidden_CD, self._weight_VD.t(), out=out)

    def accumulate(self, rows: slice, gradient_CV: Tensor) -> None:
        if self._to_bias_V is not None:
            self._to_bias_V += gradient_CV.sum(0)
        if gradient_CV.dtype != self._logits_CV.dtype:
            gradient_CV = self._logits_CV[: len(gradient_CV)].copy_(gradient_CV)
        if self._to_hidden_TD is not None:
            torch.mm(gradient_CV, self._weight_VD, out=self._to_hidden_TD[rows])
        if self._to_weight_VD is not None:
            self._add_to_weight(gradient_CV, self._hidden_TD[rows])

    def _add_to_weight(self, gradient_CV: Tensor, hidden_CD: Tensor) -> None:
        if self._product_VD is None:
            self._to_weight_VD.addmm_(gradient_CV.t(), hidden_CD)
        else:
            self._to_weight_VD += torch.mm(gradient_CV.t(), hidden_CD, out=self._product_VD)

    def gradients(self) -> Sequence[Tensor | None]:
        return [self._to_hidden_TD, self._to_weight_VD, *([self._to_bias_V] if self._bias_V is not None else [])]


class _Graph:
    """Any head: its own `logits`, differentiated by autograd a chunk at a time."""

    def __init__(self, task: _Task, hidden_TD: Tensor, needs: Sequence[bool]) -> None:
        self._head, self._hidden_TD, self._weights, self._needs = task.head, hidden_TD, task.weights, needs
        self._to_hidden_TD = torch.empty_like(hidden_TD) if needs[0] else None
        self._to_weights = [
            torch.zeros_like(weight, dtype=accumulation_dtype(weight.dtype)) if needed else None
            for weight, needed in zip(task.weights, needs[1:], strict=True)
        ]

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
