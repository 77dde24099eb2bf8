"""Building blocks every model needs, which follow the engine's precision and initialisation contracts.

Precision: parameters are stored in float32 and cast where they are used to the dtype of the activations that reach
them, so the dtype that `embed` emits (`context.dtype`) is the compute dtype of the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from forge_core.contracts.model import Fill, VocabShard


class Linear(nn.Module):
    """y = x Wᵀ + b in the dtype of x; `weight` is (out, in), drawn from N(0, std²), `bias` starts at zero."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False, std: float = 0.02) -> None:
        super().__init__()
        self.in_features, self.out_features, self.std = in_features, out_features, std
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def init_parameter(self, name: str, fill: Fill) -> None:
        if name == "weight":
            fill.normal(self.std)
        else:
            fill.constant(0.0)

    def init_buffers(self, device: torch.device) -> None:
        """There are none."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


class Embedding(nn.Module):
    """Rows of a table, given in `dtype`; `weight` is (vocabulary, dim), drawn from N(0, std²)."""

    def __init__(self, vocab_size: int, dim: int, *, dtype: torch.dtype = torch.float32, std: float = 0.02) -> None:
        super().__init__()
        self.dtype, self.std = dtype, std
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))

    def init_parameter(self, name: str, fill: Fill) -> None:
        fill.normal(self.std)

    def init_buffers(self, device: torch.device) -> None:
        """There are none."""

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight).to(self.dtype)


class LinearHead(Linear):
    """The output projection: a `Linear` that implements `forge_core.contracts.model.Head`."""

    vocab_shard: VocabShard | None = None

    def __init__(self, dim: int, vocab_size: int, *, bias: bool = False, std: float = 0.02) -> None:
        super().__init__(dim, vocab_size, bias=bias, std=std)
        self._whole: tuple[Tensor, ...] | None = None

    @contextmanager
    def whole(self, dtype: torch.dtype | None = None) -> Iterator[Sequence[Tensor]]:
        """See `Head.whole`. `dtype`: cast once to this; by default the parameters' own."""
        parameters = (self.weight,) if self.bias is None else (self.weight, self.bias)
        self._whole = tuple(parameter.to(dtype or parameter.dtype) for parameter in parameters)
        try:
            yield self._whole
        finally:
            self._whole = None

    def logits(self, hidden: Tensor) -> Tensor:
        if self._whole is None:
            return self(hidden)
        weight, *bias = (tensor.to(hidden.dtype) for tensor in self._whole)
        return F.linear(hidden, weight, *bias)
