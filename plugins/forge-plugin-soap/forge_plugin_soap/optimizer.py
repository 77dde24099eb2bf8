"""What the component `soap` builds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge_core.checkpoint.state import empty_slot
from forge_core.parallel.mesh import local_part
from forge_kit.matrix_optimizer import MatrixOptimizer, divide
from forge_kit.whole_matrices import Matrix, WholeMatrices
from forge_plugin_soap.preconditioner import Preconditioner

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.parameters import NamedParameters
    from forge_plugin_soap.soap import SOAP

GROUP_KEYS = ("lr", "weight_decay", "betas", "eps", "precondition_frequency")
STEP = "step"


class SOAPOptimizer(MatrixOptimizer):
    """See `forge_plugin_soap.SOAP`.

    The owner of a matrix has its state, in slots `exp_avg`, `left`, …; of the third matrix that a parameter stacks, in
    `exp_avg-2`, `left-2`, …. All ranks count the gradients of a parameter, in `step`.

    Args:
        parameters: all of a model.
    """

    matrix_key = "precondition_frequency"

    def __init__(self, component: SOAP, context: BuildContext, parameters: NamedParameters) -> None:
        matrices, others = divide(parameters)
        adam = torch.optim.AdamW(
            others.groups(component.adam_weight_decay),
            component.adam_lr or component.lr,
            component.adam_betas,
            component.adam_eps,
            fused=component.fused,
        )
        beta = component.betas[1] if component.preconditioner_beta is None else component.preconditioner_beta
        settings = {key: getattr(component, key) for key in GROUP_KEYS} | {"preconditioner_beta": beta}
        self._max_dim, frequency = component.max_dim, component.precondition_frequency
        whole = WholeMatrices(
            [item.parameter for item in matrices], context, lambda shape: _cost(shape, component.max_dim, frequency)
        )
        super().__init__(matrices, settings, whole, adam)
        self._owned = {(m.parameter, m.item) for m in whole.owned(self.numbers.values())}

    def step_matrices(self, group: dict[str, Any]) -> None:
        trained = {self.numbers[p]: p for p in group["params"] if p.grad is not None}
        for parameter in trained.values():
            self.state[parameter][STEP] = self.state[parameter].get(STEP, 0) + 1

        def precondition(gradients: Sequence[Tensor]) -> list[Tensor]:
            owned = self.matrices.owned(trained)
            return [
                self._precondition(matrix, self.state[trained[matrix.parameter]], gradient, group)
                for matrix, gradient in zip(owned, gradients, strict=True)
            ]

        updates = self.matrices.map({n: local_part(p.grad) for n, p in trained.items()}, precondition)
        for number, parameter in trained.items():
            done = self.state[parameter][STEP] - 1
            if done:  # the first gradient only starts the preconditioner
                weight, rate = local_part(parameter), group["lr"] * _debias(group["betas"], done)
                weight.add_(updates[number], alpha=-rate)
                weight.mul_(1 - group["lr"] * group["weight_decay"])

    def _precondition(self, matrix: Matrix, state: dict[str, Any], gradient: Tensor, group: dict[str, Any]) -> Tensor:
        """The update of a matrix that this rank owns, of length 1 an element or so."""
        suffix = "" if matrix.item is None else f"-{matrix.item}"
        betas = (*group["betas"], group["preconditioner_beta"])
        if state[STEP] == 1:
            own = Preconditioner.started(gradient, betas[2], self._max_dim)
            update = torch.zeros_like(gradient)
        else:
            own = Preconditioner.of(state, suffix)
            update = own.update(gradient, betas, group["eps"])
            own.follow(gradient, betas[2], correct=(state[STEP] - 1) % group["precondition_frequency"] == 0)
        state |= own.slots(suffix)
        return update

    def empty_slot(self, parameter: Tensor, slot: str, size: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """See `forge_core.contracts.optimizer.PlacesState`."""
        if parameter not in self.numbers:
            return empty_slot(parameter, size, dtype)
        _, _, item = slot.partition("-")
        if (self.numbers[parameter], int(item) if item else None) in self._owned:
            return torch.empty(size, dtype=dtype, device=parameter.device)
        return None


def _debias(betas: tuple[float, float], updates: int) -> float:
    """Adam's correction for averages that started at zero."""
    return math.sqrt(1 - betas[1] ** updates) / (1 - betas[0] ** updates)


def _cost(shape: Sequence[int], max_dim: int, frequency: int) -> float:
    """Multiplications of a step for a matrix, about: three times there or back and one outer product for each side, and
    now and then a product and a QR decomposition."""
    rows, columns = shape
    return sum(4 * rows * columns * side + 4 * side**3 / frequency for side in shape if side <= max_dim)
