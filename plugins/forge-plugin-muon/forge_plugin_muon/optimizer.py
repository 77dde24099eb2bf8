"""What the component `muon` builds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge_core.engine.parameters import NamedParameter, NamedParameters
from forge_core.parallel.mesh import local_part
from forge_core.parallel.whole_matrices import WholeMatrices
from forge_plugin_muon.muon import MATRICES
from forge_plugin_muon.newton_schulz import orthogonalise

if TYPE_CHECKING:
    from forge_core.context import BuildContext
    from forge_plugin_muon.muon import Muon

GROUP_KEYS = ("momentum", "nesterov", "ns_steps", "ns_coefficients", "ns_eps", "scaling")


class MuonOptimizer(torch.optim.Optimizer):
    """Groups with a key `momentum` are of matrices. The others are stepped by torch's AdamW, which shares groups and
    state with this optimizer.

    Args:
        parameters: all of a model. Those with the roles `matrix`, `stack` and `fused`, of two or three dimensions, are
            orthogonalised.

    Attributes:
        matrices: who works on which of them.
    """

    def __init__(self, component: Muon, context: BuildContext, parameters: NamedParameters) -> None:
        matrices = NamedParameters([item for item in parameters if _is_matrix(item)])
        others = NamedParameters([item for item in parameters if not _is_matrix(item)])
        decay = component.adam_weight_decay
        adam = torch.optim.AdamW(
            others.groups(decay), component.adam_lr, component.adam_betas, component.adam_eps, fused=component.fused
        )
        own = matrices.group(
            lr=component.lr,
            weight_decay=component.weight_decay,
            momentum=component.momentum if isinstance(component.momentum, float) else 0.0,
            **{key: getattr(component, key) for key in GROUP_KEYS[1:]},
        )
        super().__init__([own], {"fused": component.fused})
        self._adam = adam
        self.param_groups += adam.param_groups
        adam.state = self.state
        self._numbers = {item.parameter: number for number, item in enumerate(matrices)}
        self.matrices = WholeMatrices([item.parameter for item in matrices], context)
        self._dtype = torch.bfloat16 if component.ns_dtype == "bf16" else torch.float32

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient. Collective over the ranks that share matrices."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if "momentum" in group:
                self._step_matrices(group)
        self._adam.param_groups = [group for group in self.param_groups if "momentum" not in group]
        self._adam.step()
        return loss

    def _step_matrices(self, group: dict[str, Any]) -> None:
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not trained:
            return
        gradients = [local_part(parameter.grad) for parameter in trained]
        averages = [local_part(self._average(parameter)) for parameter in trained]
        torch._foreach_lerp_(averages, gradients, 1 - group["momentum"])
        wanted = torch._foreach_lerp(gradients, averages, group["momentum"]) if group["nesterov"] else averages
        dtype = self._dtype if self._dtype == torch.bfloat16 else torch.promote_types(self._dtype, wanted[0].dtype)
        parts = {self._numbers[p]: part.to(dtype) for p, part in zip(trained, wanted, strict=True)}

        def orthogonal(matrices: Sequence[Tensor]) -> Sequence[Tensor]:
            return orthogonalise(matrices, group["ns_coefficients"], group["ns_steps"], group["ns_eps"])

        updates = self.matrices.map(parts, orthogonal)
        weights = [local_part(parameter) for parameter in trained]
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        for parameter, weight in zip(trained, weights, strict=True):
            rate = group["lr"] * _scale(parameter.shape, group["scaling"])
            weight.add_(updates[self._numbers[parameter]], alpha=-rate)

    def _average(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        average: Tensor = state["momentum_buffer"]
        return average


def _is_matrix(item: NamedParameter) -> bool:
    return item.role in MATRICES and item.parameter.ndim in (2, 3)


def _scale(shape: Sequence[int], scaling: str) -> float:
    """Factor on the rate of a matrix (…, rows, columns); see `Muon.scaling`."""
    rows, columns = shape[-2:]
    if scaling == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))
