"""x Wᵀ in float8, with scales taken over the whole matrix where ranks share one.

Shape suffixes: M tokens, K inputs, N outputs; lower-case letters denote this rank's part.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
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

from forge_kit.nn.adapters import HasAdapter
from forge_kit.nn.derived_class import derived
from forge_plugin_lowbit.float8.choice import without_adapter
from forge_plugin_lowbit.float8.torch_internals import all_reduce, wait_tensor

if TYPE_CHECKING:
    from forge_kit.nn.modules import MatrixShard

Groups = tuple[ProcessGroup | None, ProcessGroup | None]
"""The ranks that split the rows and the columns of a matrix; None where they are whole."""


class Float8Linear(nn.Module):
    """A linear layer that multiplies in float8; a base put before the layer's own class, whose parameters it uses.

    It changes the class instead of setting `forward` on the object, so that equal blocks share one compiled graph.
    """

    float8_config: Float8LinearConfig

    def forward(self, x: Tensor) -> Tensor:
        """(…, k) -> (…, n) in the dtype of `x`."""
        # Cast before rounding: fsdp gathers weights in this dtype, and the result must not depend on whether it runs.
        weight: Any = self.weight
        bias: Any = self.bias
        inputs, outputs = _groups(self.__dict__.get("matrix_shard"))
        rows = x.reshape(-1, x.shape[-1])
        out = Product.apply(rows, weight.to(x.dtype).t(), self.float8_config, inputs, outputs)
        out = out.reshape(*x.shape[:-1], out.shape[-1])
        return out if bias is None else out + bias.to(x.dtype)


def multiply_in_float8(layer: nn.Module, config: Float8LinearConfig) -> None:
    """Derive the class of a linear layer from `Float8Linear` and its own.

    Of a layer with an adapter, the adapter adds to the float8 product, and keeps its precision.
    """
    layer.float8_config = config  # type: ignore[assignment]
    base: Any = type(layer)
    layer.__class__ = _below_adapter(base) if issubclass(base, HasAdapter) else derived(Float8Linear, base)


@cache
def _below_adapter(adapted: Any) -> Any:
    """The class of a layer with an adapter, with `Float8Linear` between the two: the adapter calls it by `super()`."""
    attributes = {"__module__": adapted.__module__, "__qualname__": adapted.__qualname__}
    base: Any = without_adapter(adapted)
    return type(adapted.__name__, (adapted, derived(Float8Linear, base)), attributes)


def _groups(shard: MatrixShard | None) -> Groups:
    """Returns the ranks that share inputs, and those that share outputs."""
    if shard is None:
        return None, None
    return (None, shard.group) if shard.dimension == 0 else (shard.group, None)


class Product(torch.autograd.Function):
    """torchao's `Float8Linear`, operand by operand, with scales agreed over ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x_MK: Tensor,
        weight_KN: Tensor,
        config: Float8LinearConfig,
        inputs: ProcessGroup | None,
        outputs: ProcessGroup | None,
    ) -> Tensor:
        """(M, k) and (k, n) -> (M, n). `inputs` and `outputs`: ranks that divide K and N; None: they are whole."""
        ctx.save_for_backward(x_MK, weight_KN)
        ctx.config, ctx.inputs, ctx.outputs = config, inputs, outputs
        # A scale spans the dimension that the product sums over: K here, N for the inputs' gradient, M for the weights'
        # one. So each product rounds its operands again, from the saved ones in the compute precision.
        x = _rounded(x_MK, config.cast_config_input, config, GemmInputRole.INPUT, -1, (None, inputs))
        weight = _rounded(weight_KN, config.cast_config_weight, config, GemmInputRole.WEIGHT, 0, (inputs, outputs))
        return torch.mm(x, weight)

    @staticmethod
    def backward(ctx: Any, grad_MN: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        """(M, n) -> gradients of x (M, k) and of the weight (k, n); None where not needed."""
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
    """Round a matrix to float8 with its scales, unless the recipe leaves it as it is or it is in float8 already.

    Args:
        x: the matrix, this rank's part of it.
        cast: dtype and granularity of the scales.
        config: the recipe.
        role: the operand's role in the product, by which torchao's tensors choose their settings.
        dim: the dimension that the product sums over, along which scales of rows or columns are taken.
        groups: the ranks that split each dimension of `x`.
    """
    if cast.scaling_type is ScalingType.DISABLED or tensor_already_casted_to_fp8(x):
        return x
    axis = dim if cast.scaling_granularity is ScalingGranularity.AXISWISE else None
    amax = tensor_to_amax(x, scaling_granularity=cast.scaling_granularity, axiswise_dim=axis)
    # The maximum over the whole matrix, so that rounding does not depend on the tensor-parallel layout.
    amax = _largest(amax, groups if axis is None else (groups[axis],))
    scale = amax_to_scale(amax, cast.target_dtype, config.round_scales_to_power_of_2)
    return hp_tensor_and_scale_to_float8(x, scale, cast.target_dtype, multiplication(config), role, axis)


def _largest(amax: Tensor, groups: Iterable[ProcessGroup | None]) -> Tensor:
    for group in groups:
        if group is not None:
            amax = wait_tensor(all_reduce(amax, "max", group))
    return amax


def multiplication(config: Float8LinearConfig) -> LinearMMConfig:
    """Settings of the three products, in the form that torchao's tensors carry."""
    products = (config.gemm_config_output, config.gemm_config_grad_input, config.gemm_config_grad_weight)
    # The last two: results are not in float8, and sizes are multiples of 16 already, so nothing is padded
    return LinearMMConfig(
        *(ScaledMMConfig(config.emulate, product.use_fast_accum, False, False) for product in products)
    )
