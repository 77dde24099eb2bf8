"""Routed experts with stacked weights.

Shapes: T tokens; K choices of each; M rows, each a token for one expert, ordered by expert; E experts; D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.contracts.model import Fill
from forge_kit.nn.dispatch import Dispatch
from forge_kit.nn.products import size_multiple
from forge_kit.torch_internals import FakeTensor
from forge_plugin_transformer import InitStd

GROUPED = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of `grouped_mm` on a CPU. On CUDA, it takes bfloat16."""


class StackedLinear(nn.Module):
    """x Wₑᵀ, plus bₑ if there are biases, for each expert e: (M, in) -> (M, out). Biases start at zero."""

    def __init__(
        self, experts: int, inputs: int, outputs: int, *, std: float, grouped: bool, bias: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(experts, outputs)) if bias else None
        self.std, self.grouped = std, grouped

    def init_parameter(self, name: str, fill: Fill) -> None:
        if name == "weight":
            fill.normal(self.std)
        else:
            fill.constant(0.0)

    def init_buffers(self, device: torch.device) -> None:
        """There are none."""

    def resized(self, inputs: int, outputs: int, *, std: float) -> StackedLinear:
        """As many matrices of other widths; see `forge_kit.nn.adapters.Adaptable`."""
        return StackedLinear(len(self.weight), inputs, outputs, std=std, grouped=self.grouped)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """`ends` (E,), int32: the row after the last one of each expert."""
        y = self._products(x, ends)
        return y if self.bias is None else _AddBiases.apply(y, self.bias.to(x.dtype), ends)

    def _products(self, x: Tensor, ends: Tensor) -> Tensor:
        if self.grouped and x.dtype != self.weight.dtype and _knows_sizes(x):
            return _CastingProduct.apply(x, self.weight, _sizes(ends, len(x)))
        weight = self.weight.to(x.dtype)
        if self.grouped:
            return _aligned_product(x, weight, ends)
        # The host needs the sizes here, and so waits for a GPU
        parts = x.split(_sizes(ends, len(x)))
        return torch.cat([F.linear(rows, own) for rows, own in zip(parts, weight.unbind(), strict=True)])


def _aligned_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`_GroupedProduct` of any widths, with zeros up to multiples of 16 bytes, which `grouped_mm` demands."""
    # Such as the few columns of an adapter: a loop over experts would make the host wait for a GPU
    unit = 16 // weight.dtype.itemsize
    outputs, inputs = weight.shape[1:]
    more_inputs, more_outputs = -inputs % unit, -outputs % unit
    if not (more_inputs or more_outputs):
        return _GroupedProduct.apply(x, weight, ends)
    wide = F.pad(weight, (0, more_inputs, 0, more_outputs))
    return _GroupedProduct.apply(F.pad(x, (0, more_inputs)), wide, ends)[:, :outputs]


class _AddBiases(torch.autograd.Function):
    """y + b of each row's expert: rows (M, out), biases (E, out).

    The gradient of biases is a product with a matrix of ones and zeros, one kernel for all experts: the gradient of an
    index operation would add rows to few places at once, in an order that changes from run to run on a GPU.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, ends: Tensor) -> Tensor:
        experts = len(bias)
        rows = torch.arange(len(y), device=y.device, dtype=ends.dtype)
        # Clamped for rows beyond the last expert's, of which there are some while a step is planned.
        owners = torch.searchsorted(ends, rows, right=True).clamp(max=experts - 1)
        ctx.save_for_backward(owners)
        ctx.experts = experts
        return y + bias.index_select(0, owners)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (owners,) = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return grad, None, None
        owned = owners.unsqueeze(0) == torch.arange(ctx.experts, device=grad.device).unsqueeze(1)
        return grad, owned.to(grad.dtype) @ grad, None


class _GroupedProduct(torch.autograd.Function):
    """`grouped_mm`, whose own backward refuses gradients that are expanded or laid out by columns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return _product(x, weight.mT, ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, ends = ctx.saved_tensors
        grad = grad.contiguous()
        of_x = _product(grad, weight, ends) if ctx.needs_input_grad[0] else None
        of_weight = _product(grad.mT, x, ends) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, None


class _CastingProduct(torch.autograd.Function):
    """`grouped_mm` as a CPU computes it, one product after the other, with weights cast one expert at a time.

    The cast of a whole stack, and its gradient before that is cast, were fresh memory in every step, and with 128
    experts took more time than the products.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sizes = sizes
        out = x.new_empty(len(x), weight.shape[1])
        for rows, own, result in zip(x.split(sizes), weight, out.split(sizes), strict=True):
            if len(rows):
                torch.mm(rows, own.to(x.dtype).mT, out=result)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, _ = ctx.needs_input_grad
        of_x, of_weight = torch.empty_like(x), torch.empty_like(weight)
        by_expert = (tensor.split(ctx.sizes) for tensor in (x, grad.contiguous(), of_x))
        for rows, grads, of_rows, own, of_own in zip(*by_expert, weight, of_weight, strict=True):
            # Without rows, too: the product is then 0, and the memory of `of_weight` is not initialised
            if for_weight:
                of_own.copy_(grads.mT @ rows)
            if for_x and len(rows):
                torch.mm(grads, own.to(x.dtype), out=of_rows)
        return of_x if for_x else None, of_weight if for_weight else None, None


def _product(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """`grouped_mm`, as an opaque operator where torch cannot trace it."""
    # Tracing accepts bfloat16 only, whatever the device computes (torch 2.13).
    if torch.compiler.is_compiling() and a.dtype != torch.bfloat16:
        return _opaque_product(a, b, ends)
    return F.grouped_mm(a, b, offs=ends)


@torch.library.custom_op("forge_moe::grouped_mm", mutates_args=())
def _opaque_product(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(a, b, offs=ends)


@_opaque_product.register_fake
def _shape_of_product(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    # A stack of matrices for rows of `a`, or (gradients of weights) a matrix for each group of columns
    groups = () if b.ndim == 3 else ends.shape
    return a.new_empty(*groups, a.shape[0], b.shape[-1])


class SwiGLUForm(NamedTuple):
    """What experts compute between their matrices: gate * sigmoid(alpha * gate) * (up + offset), of bounded inputs."""

    # A named tuple: torch.compile treats equal ones as one constant, and blocks with experts as one graph.

    alpha: float = 1.0
    """Factor inside the sigmoid; 1: silu."""
    limit: float = 0.0
    """Bound of the gate from above, and of `up` on both sides; 0: there is none."""
    offset: float = 0.0
    """Added to `up`."""

    def of(self, gate: Tensor, up: Tensor) -> Tensor:
        """Returns the product, in the shape of `gate` and `up`."""
        if self.limit:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        swish = F.silu(gate) if self.alpha == 1 else gate * torch.sigmoid(self.alpha * gate)
        return swish * (up + self.offset if self.offset else up)


class GEGLUForm(NamedTuple):
    """What experts compute between their matrices: gelu(gate) * up."""

    approximate: str = "tanh"

    def of(self, gate: Tensor, up: Tensor) -> Tensor:
        """Returns the product, in the shape of `gate` and `up`."""
        return F.gelu(gate, approximate=self.approximate) * up


PLAIN = SwiGLUForm()


class Experts(nn.Module):
    """downₑ(a(gateₑ(x), upₑ(x))) for each expert e, where a is SwiGLU's or GEGLU's, or downₑ(relu(upₑ(x))²).

    See `forge_kit.nn.dispatch.ExpertStack`.
    """

    def __init__(
        self,
        experts: int,
        dim: int,
        hidden: int,
        *,
        init: InitStd,
        grouped: bool,
        bias: bool = False,
        swiglu: SwiGLUForm | GEGLUForm | None = PLAIN,
        weight_input: bool = False,
    ) -> None:
        """Set up the stacks.

        Args:
            experts: E.
            dim: D.
            hidden: width between the matrices.
            init: deviations of matrices.
            grouped: whether products of all experts are one kernel.
            bias: whether matrices have biases.
            swiglu: what is between them; None: a squared ReLU, without a gate.
            weight_input: whether weights are factors of what experts read, and not of what they return.
        """
        super().__init__()
        if swiglu is not None:
            self.gate = StackedLinear(experts, dim, hidden, std=init.inner, grouped=grouped, bias=bias)
        self.up = StackedLinear(experts, dim, hidden, std=init.inner, grouped=grouped, bias=bias)
        self.down = StackedLinear(experts, hidden, dim, std=init.residual, grouped=grouped, bias=bias)
        self.swiglu = swiglu
        self.weight_input = weight_input

    def forward(
        self,
        tokens: Tensor,
        weights: Tensor,
        chosen: Tensor,
        rows: int | None = None,
        overlap_fn: Callable[[], None] | None = None,
    ) -> Tensor:
        """(T, D), weights and choices (T, K), to (T, D)."""
        if overlap_fn is not None:
            # Nothing is in flight on a single rank
            overlap_fn()
        if rows is None:
            planned = isinstance(chosen, FakeTensor)  # then the number is unknown, and all choices are the bound
            rows = chosen.numel() if planned else int((chosen >= 0).sum())
        dispatch = Dispatch.to_groups(chosen, self.down.weight.shape[0], rows, row_multiple(tokens))
        ends = dispatch.counts.cumsum(0, dtype=torch.int32)
        x = dispatch.to_rows(tokens)
        if self.weight_input:
            x = x * dispatch.of_rows(weights).to(x.dtype).unsqueeze(1)
            # Not left out, as rows for no choice need the weight 0
            weights = torch.ones_like(weights)
        if self.swiglu is None:
            inner = F.relu(self.up(x, ends)).square()
        else:
            inner = self.swiglu.of(self.gate(x, ends), self.up(x, ends))
        y = self.down(inner, ends)
        return dispatch.add_up(y, weights)


def _sizes(ends: Tensor, rows: int) -> list[int]:
    """Returns the rows of each expert; equal parts while a step is planned, where they are unknown."""
    if isinstance(ends, FakeTensor):
        return [len(part) for part in torch.arange(rows).tensor_split(len(ends))]
    sizes: list[int] = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return sizes


def row_multiple(x: Tensor) -> int:
    """Returns the multiple to which each expert's rows are padded: 1 if traced or planned, where none are known."""
    return size_multiple(x.dtype) if _knows_sizes(x) else 1


def _knows_sizes(x: Tensor) -> bool:
    """Whether the host has the numbers of rows without waiting: on a CPU, unless x is traced or planned."""
    return x.device.type == "cpu" and not (torch.compiler.is_compiling() or isinstance(x, FakeTensor))


def runs_grouped(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `grouped_mm` computes such products."""
    if device.type != "cpu":
        return dtype == torch.bfloat16
    return dtype in GROUPED
