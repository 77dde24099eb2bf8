"""Normalisation over the last dimension, computed in float32 or wider."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from forge_kit.nn.direct_calls import directly_callable
from forge_kit.nn.modules import cast

if TYPE_CHECKING:
    from forge_core.contracts.model import Fill


@directly_callable
class RootMeanSquareNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) * (offset + weight), in the dtype of x; starts as the plain normalisation."""

    def __init__(self, dim: int, *, eps: float, offset: int = 0) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.empty(dim))

    def init_parameter(self, name: str, fill: Fill) -> None:
        """Fills the weight so that the gain, offset + weight, is 1."""
        fill.constant(1.0 - self.offset)

    def init_buffers(self, device: torch.device) -> None:
        """There are none."""

    def forward(self, x: Tensor) -> Tensor:
        """(…, D) to (…, D). On a CPU, the way depends on the number of positions and on gradients."""
        gain = self.gain(x.dtype)
        if x.is_cpu:
            if not torch.is_grad_enabled() and x.ndim > 2 and x.shape[1] == 1 and type(x) is Tensor:
                return _normed_position(x, gain, self.eps)
            if not torch.is_grad_enabled():  # as a function of autograd takes as long as the norm of few rows
                return _normed(x, gain, self.eps)[0]
            return _CPUNorm.apply(x, gain, self.eps)  # type: ignore[no-untyped-call]
        # torch's fused kernel takes one dtype, so a wide gain needs a wide x.
        return F.rms_norm(x.to(gain.dtype), gain.shape, gain, self.eps).to(x.dtype)

    def gain(self, dtype: torch.dtype) -> Tensor:
        """Returns the factor on each feature: for x in `dtype`, in that or wider."""
        weight = cast(self.weight, dtype)
        if not self.offset:
            return weight
        # 1 + weight has fewer digits of a small weight than weight itself: Gemma adds and multiplies in float32.
        return weight.to(torch.promote_types(dtype, torch.float32)) + self.offset

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}" + (f", offset={self.offset}" if self.offset else "")


@directly_callable
class SplitRootMeanSquareNorm(RootMeanSquareNorm):
    """The same for features that may be split over tensor-parallel ranks: each then has the weights of its features."""

    def __init__(self, dim: int, *, eps: float, offset: int = 0) -> None:
        super().__init__(dim, eps=eps, offset=offset)
        # Kept, since tensor parallel shortens the weight to the features of this rank
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """(…, D or this rank's features) to the same; the mean is over all D features in both cases."""
        if x.shape[-1] == self.dim:
            return super().forward(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = self.sum_features(wide.square()) / self.dim
        return (wide * (mean + self.eps).rsqrt() * self.gain(x.dtype)).to(x.dtype)

    def sum_features(self, x: Tensor) -> Tensor:
        """Returns the sum over all features of x (…, this rank's): (…, 1). The way `split_features` adds the ranks'."""
        return x.sum(-1, keepdim=True)


@directly_callable
class CentredNorm(nn.Module):
    """(x - mean(x)) / sqrt(var(x) + eps) * (offset + weight) + bias, in the dtype of x; starts as the plain norm."""

    def __init__(self, dim: int, *, eps: float, bias: bool, offset: int = 0) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim)) if bias else None

    def init_parameter(self, name: str, fill: Fill) -> None:
        """Fills the weight so that the gain, offset + weight, is 1, and the bias with 0."""
        fill.constant(1.0 - self.offset if name == "weight" else 0.0)

    def init_buffers(self, device: torch.device) -> None:
        """There are none."""

    def forward(self, x: Tensor) -> Tensor:
        """(…, D) to (…, D), by torch's kernel, which accumulates in float32 or wider."""
        bias = None if self.bias is None else cast(self.bias, x.dtype)
        # Before it is rounded to the dtype of x, as 1 + weight has fewer digits of a small weight than weight itself
        gain = self.weight + self.offset if self.offset else self.weight
        return F.layer_norm(x, gain.shape, cast(gain, x.dtype), bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}, bias={self.bias is not None}"


@directly_callable
class HeadLayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight for each head, each by its own; starts as the plain norm."""

    def __init__(self, heads: int, width: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(heads, width))

    def init_parameter(self, name: str, fill: Fill) -> None:
        """Fills the weight with 1."""
        fill.constant(1.0)

    def init_buffers(self, device: torch.device) -> None:
        """There are none."""

    def forward(self, x: Tensor) -> Tensor:
        """(…, heads, E) to the same, heads being all or a rank's; computed in float32 or wider."""
        wide = cast(x, torch.promote_types(x.dtype, torch.float32))
        gain = cast(cast(self.weight, x.dtype), wide.dtype)
        return cast(F.layer_norm(wide, x.shape[-1:], eps=self.eps) * gain, x.dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


@directly_callable
class GainlessNorm(nn.Module):
    """x / sqrt(mean(x²) + eps), in the dtype of x, without parameters."""

    def __init__(self, *, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(…, D) to (…, D)."""
        return normed_without_gain(x, self.eps)

    def extra_repr(self) -> str:
        return f"eps={self.eps}"


def normed_without_gain(x: Tensor, eps: float) -> Tensor:
    """Returns x / sqrt(mean(x²) + eps) (…, D), in the dtype of x."""
    wide = cast(x, torch.promote_types(x.dtype, torch.float32))
    return cast(F.rms_norm(wide, x.shape[-1:], eps=eps), x.dtype)


def _normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the norm of x (…, D), and the factor on each row (…, 1), float32 or wider."""
    # Squares of float16 overflow, and a sum of bfloat16 has 8 bits
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    scaled = wide * scale
    # In place, which halves the time of large tensors. But compiled by torch 2.11, a function whose last operation
    # returns its own argument, in place or as a conversion without effect, loses the gradients of its inputs.
    normed = scaled * weight if torch.compiler.is_compiling() else scaled.mul_(weight)
    return (normed if normed.dtype == x.dtype else normed.to(x.dtype)), scale


def _normed_position(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns the norm of x (B, 1, …, D), a generated token, with as few operations as there are: each costs a call."""
    wide = cast(x, torch.promote_types(x.dtype, torch.float32))
    dim = x.shape[-1]
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    if x.numel() == dim and not torch.compiler.is_compiling():
        # A single row: arithmetic of the host costs less than operations on one number
        factor = dim**0.5 / math.hypot(length.item(), (eps * dim) ** 0.5)
        return cast((wide * weight).mul_(factor), x.dtype)
    # sqrt(D) x / sqrt(sum(x²) + eps D); the 0 lets one operation multiply by the gain and by sqrt(D)
    divided = wide / torch.hypot(length, _scalar((eps * dim) ** 0.5, wide.dtype))
    return cast(torch.addcmul(_scalar(0.0, wide.dtype), divided, weight, value=dim**0.5), x.dtype)


@lru_cache(maxsize=16)
def _scalar(value: float, dtype: torch.dtype) -> Tensor:
    """Returns a number as a tensor on the CPU."""
    return torch.tensor(value, dtype=dtype, device="cpu")


class _CPUNorm(torch.autograd.Function):
    """RMS norm that saves only x and one number a row for the backward pass.

    torch has no fused kernel for it on the CPU; its own chain of operations saves float32 copies and takes three times
    as long.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed, scale = _normed(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """With n = x * scale and g = grad * weight: dx = scale * (g - n * mean(g * n))."""
        x, weight, scale = ctx.saved_tensors
        wide, grad_wide = (t.to(scale.dtype).flatten(0, -2) for t in (x, grad))
        scale = scale.flatten(0, -2)
        product = grad_wide * wide
        # A product instead of a sum over rows, which would need the scaled rows in memory first
        grad_weight = (scale.mT @ product).squeeze(0)
        # scale³: the formula has one factor before the bracket, and one in each of the two n
        mean = (product @ weight.to(scale.dtype)[:, None]).mul_(scale.pow(3)).div_(-x.shape[-1])
        grad_x = (grad_wide * weight).mul_(scale).addcmul_(wide, mean)
        return grad_x.to(x.dtype).view_as(x), grad_weight.to(weight.dtype), None
