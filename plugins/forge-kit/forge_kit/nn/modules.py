"""Building blocks every model needs, which follow the engine's precision and initialisation contracts.

Precision: parameters are stored in float32 and cast where they are used to the dtype of the activations that reach
them, so the dtype that `embed` emits (`context.dtype`) is the compute dtype of the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from forge_kit.nn.direct_calls import directly_callable

if TYPE_CHECKING:
    from forge_core.contracts.model import Fill, VocabShard


class MatrixShard(NamedTuple):
    """The ranks that share a module's `weight` (out, in), and how; a stage that splits it sets it as `matrix_shard`."""

    # Code that depends on the whole matrix (the scale of a float8 product) agrees with them without knowing the stage.

    group: torch.distributed.ProcessGroup
    dimension: int
    """0: each rank holds some of the outputs. 1: each holds some of the inputs, and results are summed over ranks."""


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the tensor in a dtype, as `Tensor.to`, whose call costs as much as a small operation for nothing."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


@directly_callable
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
        """(…, in) -> (…, out); weight and bias are cast to the dtype of x."""
        bias = None if self.bias is None else cast(self.bias, x.dtype)
        return F.linear(x, cast(self.weight, x.dtype), bias)

    def resized(self, inputs: int, outputs: int, *, std: float) -> Linear:
        """See `forge_kit.nn.adapters.Adaptable`."""
        return Linear(inputs, outputs, std=std)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


class LayerNorm(nn.LayerNorm):
    """torch's, in the dtype of x (it computes in float32 or wider inside); starts as the plain normalisation.

    The weights are cast as in `Linear`. A norm that widens x to their dtype instead rounds them under FSDP,
    which gathers in the compute dtype, and not in one process.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(…, D) -> (…, D); weight and bias are cast to the dtype of x."""
        weight, bias = (None if part is None else cast(part, x.dtype) for part in (self.weight, self.bias))
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class Embedding(nn.Module):
    """Rows of a table in `dtype`; `weight` is (vocabulary, dim), drawn from N(0, std²)."""

    def __init__(self, vocab_size: int, dim: int, *, dtype: torch.dtype = torch.float32, std: float = 0.02) -> None:
        super().__init__()
        self.dtype, self.std = dtype, std
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))

    def init_parameter(self, name: str, fill: Fill) -> None:
        fill.normal(self.std)

    def init_buffers(self, device: torch.device) -> None:
        """There are none."""

    def forward(self, ids: Tensor) -> Tensor:
        """(…) int64 to (…, dim)."""
        rows = rows_of(self.weight, ids) if self.weight.dtype.itemsize < 4 else F.embedding(ids, self.weight)
        return rows.to(self.dtype)


def rows_of(table: Tensor, ids: Tensor) -> Tensor:
    """Rows of a table of 16 bits, whose gradient is added up in float32 and rounded once.

    `F.embedding` adds equal ids in the table's dtype on a CPU, where bfloat16 stands still at 256 + 1: the gradient of
    a frequent token would be too small, by more the larger the micro-batch.

    Args:
        table: (vocabulary, dim).
        ids: (…), int64.

    Returns:
        (…, dim), in the table's dtype.
    """
    return _Rows.apply(table, ids)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.size, ctx.dtype = table.shape[0], table.dtype
        return F.embedding(ids, table)

    @staticmethod
    # The gradient has none itself: a second derivative is an error, and not wrong
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        return _sums_by_id(grad.flatten(0, -2), ids.flatten(), ctx.size).to(ctx.dtype), None


def _sums_by_id(rows: Tensor, ids: Tensor, size: int) -> Tensor:
    """(N, D) to (size, D): the float32 sum of the rows of each id, rounded to the dtype of `rows`.

    Each id's rows are a bag, so no two writes meet and sums do not depend on their order. There are N bags, of which
    those after the last id are empty: the host does not wait for how many ids there are.
    """
    total = rows.new_zeros(size, rows.shape[1])
    if not len(ids):
        return total
    # Stable, so that rows of one id are added up in their order on every device
    ordered, order = ids.sort(stable=True)
    # Number of the distinct id of each row, ascending
    bag = F.pad(ordered[1:] != ordered[:-1], (1, 0)).cumsum(0)
    starts = torch.searchsorted(bag, torch.arange(len(ids), device=ids.device))
    sums = F.embedding_bag(order, rows.float(), starts, mode="sum")
    # Empty bags begin behind the end; they add zeros to the largest id
    owners = ordered.index_select(0, starts.clamp(max=len(ids) - 1))
    return total.index_add_(0, owners, sums.to(rows.dtype))


FEW_ROWS = 8
"""Rows of hidden states up to which a CPU multiplies them by a large table faster as W xᵀ, in float32."""
LARGE_TABLE = 1 << 20
"""Weights of a table that is larger than the cache of a core. Measured by `tests/benchmarks/head_product.py`."""


def _is_faster_transposed(head: LinearHead, x: Tensor) -> bool:
    """Whether W xᵀ takes less time than x Wᵀ, as in generation of some rows, where the head is most of the work."""
    # Training has more rows, and its logits must lie in memory as the losses expect
    if torch.is_grad_enabled() or x.device.type != "cpu" or x.dtype != torch.float32:
        return False
    return 1 < x.numel() // x.shape[-1] <= FEW_ROWS and head.weight.numel() >= LARGE_TABLE


def _transposed_product(head: LinearHead, x: Tensor) -> Tensor:
    """(…, D) -> (…, V), computed as (V, rows)."""
    logits = F.linear(cast(head.weight, x.dtype), x.reshape(-1, x.shape[-1])).t().reshape(*x.shape[:-1], -1)
    return logits if head.bias is None else logits + cast(head.bias, x.dtype)


class LinearHead(Linear):
    """The output projection: a `Linear` that implements `forge_core.contracts.model.Head`."""

    vocab_shard: VocabShard | None = None
    rounded: torch.dtype | None = None
    """The dtype to which weights are rounded before products in a wider one: that in which FSDP gathers them, so that
    logits in float32 are the same under every layout. None: products are in the dtype of the hidden states anyway."""

    def __init__(self, dim: int, vocab_size: int, *, bias: bool = False, std: float = 0.02) -> None:
        super().__init__(dim, vocab_size, bias=bias, std=std)
        self._whole: tuple[Tensor, ...] | None = None

    @contextmanager
    def whole(self, dtype: torch.dtype | None = None) -> Iterator[Sequence[Tensor]]:
        """See `Head.whole`. `dtype`: cast once to this; by default the parameters' own."""
        parameters = (self.weight,) if self.bias is None else (self.weight, self.bias)
        # Cast once, however often `logits` is called for parts of a sequence
        self._whole = tuple(self._as_used(parameter, dtype or parameter.dtype) for parameter in parameters)
        try:
            yield self._whole
        finally:
            self._whole = None

    def logits(self, hidden: Tensor) -> Tensor:
        """Uses the weights that `whole` holds while it is active, else calls the module, as hooks may gather them."""
        if self._whole is None:
            return self(hidden)
        weight, *bias = (tensor.to(hidden.dtype) for tensor in self._whole)
        return F.linear(hidden, weight, *bias)

    def forward(self, x: Tensor) -> Tensor:
        """(…, D) -> (…, V), by the weights that this rank has."""
        if self.rounded is None:
            return _transposed_product(self, x) if _is_faster_transposed(self, x) else super().forward(x)
        bias = None if self.bias is None else self._as_used(self.bias, x.dtype)
        return F.linear(x, self._as_used(self.weight, x.dtype), bias)

    def _as_used(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        return parameter.to(dtype) if self.rounded is None else parameter.to(self.rounded).to(dtype)
