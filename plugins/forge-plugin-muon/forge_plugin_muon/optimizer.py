"""What the component `muon` builds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge_core.parallel.mesh import local_part
from forge_kit.matrix_optimizer import MatrixOptimizer, divide
from forge_kit.whole_matrices import WholeMatrices
from forge_plugin_muon.newton_schulz import orthogonalise

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.parameters import NamedParameters
    from forge_plugin_muon.muon import Muon

GROUP_KEYS = ("nesterov", "ns_steps", "ns_coefficients", "ns_eps", "scaling")


class MuonOptimizer(MatrixOptimizer):
    """See `forge_plugin_muon.Muon`.

    Args:
        parameters: all of a model.
    """

    matrix_key = "momentum"

    def __init__(self, component: Muon, context: BuildContext, parameters: NamedParameters) -> None:
        matrices, others = divide(parameters)
        decay = component.adam_weight_decay
        adam = torch.optim.AdamW(
            others.groups(decay), component.adam_lr, component.adam_betas, component.adam_eps, fused=component.fused
        )
        settings = {
            "lr": component.lr,
            "weight_decay": component.weight_decay,
            "momentum": component.momentum if isinstance(component.momentum, float) else 0.0,
            **{key: getattr(component, key) for key in GROUP_KEYS},
        }
        super().__init__(matrices, settings, WholeMatrices([item.parameter for item in matrices], context), adam)
        self._dtype = torch.bfloat16 if component.ns_dtype == "bf16" else torch.float32

    def step_matrices(self, group: dict[str, Any]) -> None:
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not trained:
            return
        gradients = [local_part(parameter.grad) for parameter in trained]
        averages = [local_part(self._average(parameter)) for parameter in trained]
        torch._foreach_lerp_(averages, gradients, 1 - group["momentum"])
        narrow = self._dtype == torch.bfloat16
        dtype = self._dtype if narrow else torch.promote_types(self._dtype, averages[0].dtype)
        share = group["momentum"] if group["nesterov"] else 1.0
        parts = {
            self.numbers[parameter]: torch.lerp(gradient, average, share).to(dtype)
            for parameter, gradient, average in zip(trained, gradients, averages, strict=True)
        }

        def orthogonal(matrices: Sequence[Tensor]) -> Sequence[Tensor]:
            return orthogonalise(matrices, group["ns_coefficients"], group["ns_steps"], group["ns_eps"])

        updates = self.matrices.map(parts, orthogonal)
        weights = [local_part(parameter) for parameter in trained]
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        for parameter, weight in zip(trained, weights, strict=True):
            rate = group["lr"] * _scale(parameter.shape, group["scaling"])
            weight.add_(updates[self.numbers[parameter]], alpha=-rate)

    def _average(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        average: Tensor = state["momentum_buffer"]
        return average


def _scale(shape: Sequence[int], scaling: str) -> float:
    """Factor on the rate of a matrix (…, rows, columns); see `Muon.scaling`."""
    rows, columns = shape[-2:]
    if scaling == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))
