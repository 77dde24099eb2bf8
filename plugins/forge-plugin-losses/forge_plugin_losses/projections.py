"""Heads, a chunk of positions at a time: logits, and gradients of hidden states and weights.

Shape suffixes as in `chunked`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from forge_core.vocab_parallel import accumulation_dtype
from forge_kit.nn.modules import LinearHead

if TYPE_CHECKING:
    from forge_core.contracts.model import Head
    from forge_plugin_losses.workspace import Workspace


class Task(Protocol):
    """What a projection reads of a call."""

    @property
    def head(self) -> Head: ...
    @property
    def weights(self) -> Sequence[Tensor]:
        """The weights that the head's logits are made of, whole."""
        ...

    @property
    def workspace(self) -> Workspace: ...


def projection_of(task: Task, hidden_TD: Tensor, needs: Sequence[bool]) -> Projection:
    """The projection for the task's head. `needs`: see `Projection`."""
    return (LinearProjection if is_linear(task.head) else GraphProjection)(task, hidden_TD, needs)


def is_linear(head: Head) -> bool:
    """Whether the logits of a head are a product with its weights, and a bias if it has one, and nothing else."""
    # A derived class, or a stage that replaces the method, may compute something else
    return getattr(head.logits, "__func__", None) is LinearHead.logits


class Projection(Protocol):
    """A head, and the gradients that accumulate in it."""

    def __init__(self, task: Task, hidden_TD: Tensor, needs: Sequence[bool]) -> None:
        """`needs`: whether the gradient of hidden_TD, and of each weight, is needed."""

    def logits(self, rows: slice) -> Tensor:
        """Returns logits (C, V) of the positions `rows`."""
        ...

    def accumulate(self, rows: slice, gradient_CV: Tensor) -> None:
        """Add the gradient by the logits that `logits(rows)` returned last."""

    def gradients(self) -> Sequence[Tensor | None]:
        """Returns gradients of hidden_TD, in its dtype, and of each weight, in float32 or wider; None if not needed."""
        ...


class LinearProjection(Projection):
    """h Wᵀ + b written out: three matrix products a chunk, all into preallocated memory."""

    def __init__(self, task: Task, hidden_TD: Tensor, needs: Sequence[bool]) -> None:
        self._hidden_TD = hidden_TD
        self._weight_VD, *bias = task.weights
        self._bias_V = bias[0] if bias else None
        self._workspace = task.workspace
        gradients = _zeros_for(task.weights, needs[1:])
        self._to_hidden_TD = torch.empty_like(hidden_TD) if needs[0] else None
        self._to_weight_VD, self._to_bias_V = (*gradients, None)[:2]
        self._gradients = [self._to_hidden_TD, *gradients]

    def logits(self, rows: slice) -> Tensor:
        """Writes into memory that the next chunk overwrites."""
        hidden_CD = self._hidden_TD[rows]
        out = self._scratch("logits", (len(hidden_CD), len(self._weight_VD)))
        if self._bias_V is None:
            return torch.mm(hidden_CD, self._weight_VD.t(), out=out)
        return torch.addmm(self._bias_V, hidden_CD, self._weight_VD.t(), out=out)

    def accumulate(self, rows: slice, gradient_CV: Tensor) -> None:
        """Rounds the gradient to the dtype of the hidden states, in which the products are computed."""
        if self._to_bias_V is not None:
            self._to_bias_V += gradient_CV.sum(0)
        if gradient_CV.dtype != self._hidden_TD.dtype:
            # In the memory of the chunk's logits, which nothing reads any more.
            gradient_CV = self._scratch("logits", gradient_CV.shape).copy_(gradient_CV)
        if self._to_hidden_TD is not None:
            torch.mm(gradient_CV, self._weight_VD, out=self._to_hidden_TD[rows])
        if self._to_weight_VD is not None:
            self._accumulate_weight(self._to_weight_VD, gradient_CV.t(), self._hidden_TD[rows])

    def _accumulate_weight(self, total_VD: Tensor, gradient_VC: Tensor, hidden_CD: Tensor) -> None:
        # In one operation where dtypes agree; products in bf16 are added to the float32 sum apart
        if total_VD.dtype == hidden_CD.dtype:
            total_VD.addmm_(gradient_VC, hidden_CD)
        else:
            total_VD += torch.mm(gradient_VC, hidden_CD, out=self._scratch("product", total_VD.shape))

    def _scratch(self, name: str, shape: Sequence[int]) -> Tensor:
        return self._workspace.empty(name, shape, self._hidden_TD.dtype, self._hidden_TD.device)

    def gradients(self) -> Sequence[Tensor | None]:
        """Returns the sums themselves, not copies; a bias counts as a second weight."""
        return self._gradients


class GraphProjection(Projection):
    """Any head: its own `logits`, differentiated by autograd a chunk at a time."""

    def __init__(self, task: Task, hidden_TD: Tensor, needs: Sequence[bool]) -> None:
        self._head, self._weights, self._hidden_TD, self._needs = task.head, task.weights, hidden_TD, needs
        self._to_hidden_TD = torch.empty_like(hidden_TD) if needs[0] else None
        self._to_weights = _zeros_for(task.weights, needs[1:])

    def logits(self, rows: slice) -> Tensor:
        """Builds the graph of one chunk, which `accumulate` consumes; the result has no graph."""
        # The forward pass of an autograd function runs without gradients, and this head needs a graph
        with torch.set_grad_enabled(any(self._needs)):
            self._hidden_CD = self._hidden_TD[rows].detach().requires_grad_(self._needs[0])
            self._logits_CV = self._head.logits(self._hidden_CD)
        return self._logits_CV.detach()

    def accumulate(self, rows: slice, gradient_CV: Tensor) -> None:
        """Differentiates the chunk's graph, and frees it."""
        inputs = (self._hidden_CD, *self._weights)
        needed = [tensor for tensor, need in zip(inputs, self._needs, strict=True) if need]
        gradients = iter(torch.autograd.grad(self._logits_CV, needed, gradient_CV.to(self._logits_CV.dtype)))
        if self._to_hidden_TD is not None:
            self._to_hidden_TD[rows] = next(gradients)
        for total in self._to_weights:
            if total is not None:
                total.add_(next(gradients))

    def gradients(self) -> Sequence[Tensor | None]:
        """Returns the sums themselves, not copies, in the order of the head's weights."""
        return [self._to_hidden_TD, *self._to_weights]


def _zeros_for(weights: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor | None]:
    return [
        torch.zeros_like(weight, dtype=accumulation_dtype(weight.dtype)) if need else None
        for weight, need in zip(weights, needs, strict=True)
    ]
