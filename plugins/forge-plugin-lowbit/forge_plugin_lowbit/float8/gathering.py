"""Weights that fsdp gathers in float8."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

from forge_plugin_lowbit.float8.product import multiplication

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig


def gather_in_float8(module: nn.Module, config: Float8LinearConfig) -> None:
    """Replace the weight of a linear layer by one that fsdp gathers in float8, with the scale of the whole matrix.

    The parameter itself keeps its precision.
    """
    weight = module.get_parameter("weight")
    # fsdp2 gathers a tensor subclass by the subclass's own methods, here torchao's.
    cast = WeightWithDynamicFloat8CastTensor(weight, multiplication(config), config.cast_config_weight.target_dtype)
    module.weight = nn.Parameter(cast, requires_grad=weight.requires_grad)
