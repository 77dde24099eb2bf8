"""x Wᵀ in float8, with the scales of whole matrices where ranks share one.

Shapes: M tokens, K inputs, N outputs; k and n of this rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_reduce, wait_tensor
from torchao.float8 import (
    CastConfig,
    Float8LinearConfig,
    GemmInputRole,
    LinearMMConfig,
    ScalingGranularity,
    ScalingType,
)
from torchao.float8.distributed_utils import tensor_already_casted_to_fp8
from torchao.float8.float8_training_tensor import ScaledMMConfig, hp_tensor_and_scale_to_float8
from torchao.float8.float8_utils import amax_to_scale, tensor_to_amax

if TYPE_CHECKING:
    from forge_core.contracts.model import MatrixShard

Groups = tuple[ProcessGroup | None, ProcessGroup | None]
"""The ranks among which rows and columns of a matrix are split."""


class Float8Linear(nn.Module):
    """A linear layer that multiplies in float8; put before the layer's own class, whose parameters it keeps.

    A class, and not an object in place of `forward`: equal blocks then share one compiled graph.
    """

    float8_config: Float8LinearConfig

    def forward(self, x: Tensor) -> Tensor:
        """(…, k) -> (…, n) in the dtype of `x`. Weights are cast to it first, as fsdp gathers them."""
        weight: Any = self.weight
        bias: Any = self.bias
        inputs, outputs = _groups(self.__dict__.get("matrix_shard"))
        rows = x.reshape(-1, x.shape[-1])
        out = Product.apply(rows, weight.to(x.dtype).t(), self.float8_config, inputs, outputs)
        out = out.reshape(*x.shape[:-1], out.shape[-1])
        return out if bias is None else out + bias.to(x.dtype)


def multiply_in_float8(layer: nn.Module, config: Float8LinearConfig) -> None:
    """Derive the class of a linear layer from `Float8Linear` and its own."""
    layer.float8_config = config  # type: ignore[assignment]
    base: Any = type(layer)
    layer.__class__ = _derived(base)


@cache
def _derived(base: Any) -> Any:
    return type(base.__name__, (Float8Linear, base), {"__module__": base.__module__, "__qualname__": base.__qualname__})


def _groups(shard: MatrixShard | None) -> Groups:
    """The ranks that share inputs, and those that share outputs."""
    if shard is None:
        return None, None
    return (None, shard.group) if shard.dimension == 0 else (shard.group, None)


class Product(torch.autograd.Function):
    """What torchao's `Float8Linear` computes, operand by operand, with scales agreed over ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x_MK: Tensor,
        weight_KN: Tensor,
        config: Float8LinearConfig,
        inputs: ProcessGroup | None,
        outputs: ProcessGroup | None,
    ) -> Tensor:
        ctx.save_for_backward(x_MK, weight_KN)
        ctx.config, ctx.inputs, ctx.outputs = config, inputs, outputs
        x = _rounded(x_MK, config.cast_config_input, config, GemmInputRole.INPUT, -1, (None, inputs))
        weight = _rounded(weight_KN, config.cast_config_weight, config, GemmInputRole.WEIGHT, 0, (inputs, outputs))
        return torch.mm(x, weight)

    @staticmethod
    def backward(ctx: Any, grad_MN: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x_MK, weight_KN = ctx.saved_tensors
        c, role = ctx.config, GemmInputRole
        grad_x_MK = grad_weight_KN = None
        if ctx.needs_input_grad[0]:
            cast = c.cast_config_weight_for_grad_input
            grad = _rounded(grad_MN, c.cast_config_grad_output, c, role.GRAD_OUTPUT, -1, (None, ctx.outputs))
            weight = _rounded(weight_KN, cast, c, role.WEIGHT, -1, (ctx.inputs, ctx.outputs))
            grad_x_MK = torch.mm(grad, weight.t())
        if ctx.needs_input_grad[1]:
            cast = c.cast_config_grad_output_for_grad_weight
            grad = _rounded(grad_MN, cast, c, role.GRAD_OUTPUT, 0, (None, ctx.outputs))
            x = _rounded(x_MK, c.cast_config_input_for_grad_weight, c, role.INPUT, 0, (None, ctx.inputs))
            grad_weight_KN = torch.mm(grad.t(), x).t()
        return grad_x_MK, grad_weight_KN, None, None, None


def _rounded(
    x: Tensor, cast: CastConfig, config: Float8LinearConfig, role: GemmInputRole, dim: int, groups: Groups
) -> Tensor:
    """A matrix in float8 with its scales; as it is where the recipe leaves it so, or where it is in float8 already.

    Args:
        dim: the dimension over which the product sums, and over which a scale of a row or column is taken.
    """
    if cast.scaling_type is ScalingType.DISABLED or tensor_already_casted_to_fp8(x):
        return x
    axis = dim if cast.scaling_granularity is ScalingGranularity.AXISWISE else None
    amax = tensor_to_amax(x, scaling_granularity=cast.scaling_granularity, axiswise_dim=axis)
    amax = _largest(amax, groups if axis is None else (groups[axis],))
    scale = amax_to_scale(amax, cast.target_dtype, config.round_scales_to_power_of_2)
    return hp_tensor_and_scale_to_float8(x, scale, cast.target_dtype, multiplication(config), role, axis)


def _largest(amax: Tensor, groups: Iterable[ProcessGroup | None]) -> Tensor:
    for group in groups:
        if group is not None:
            amax = wait_tensor(all_reduce(amax, "max", group))
    return amax


def multiplication(config: Float8LinearConfig) -> LinearMMConfig:
    """How each of the three products is computed, as torchao's tensors want to know it."""
    products = (config.gemm_config_output, config.gemm_config_grad_input, config.gemm_config_grad_weight)
    return LinearMMConfig(
        *(ScaledMMConfig(config.emulate, product.use_fast_accum, False, False) for product in products)
    )
