"""What optimizers of whole matrices share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from forge_core.contracts.parameters import NamedParameter, NamedParameters
from forge_kit.whole_matrices import WholeMatrices

ROLES = ("matrix", "stack", "fused")
"""Of parameters that are matrices of hidden layers."""


def divide(parameters: NamedParameters) -> tuple[NamedParameters, NamedParameters]:
    """Matrices of hidden layers, which have two dimensions, or three where a parameter stacks some; and all else."""
    matrices = [item for item in parameters if _is_matrix(item)]
    return NamedParameters(matrices), NamedParameters([item for item in parameters if not _is_matrix(item)])


def _is_matrix(item: NamedParameter) -> bool:
    return item.role in ROLES and item.parameter.ndim in (2, 3)


class MatrixOptimizer(torch.optim.Optimizer):
    """Base of an optimizer that steps matrices in a way of its own (`step_matrices`), and leaves all other parameters
    to an AdamW, which shares groups and state with it.

    Args:
        matrices: the parameters that are stepped here (`divide` gives them).
        settings: of their group: `lr`, `weight_decay` and others.
        whole: who works on which of them, numbered as they are in `matrices`.
        adam: of all other parameters.

    Attributes:
        matrices: `whole`.
        numbers: the number in it of each parameter.
    """

    matrix_key: ClassVar[str]
    """A key that groups of matrices have, and those of AdamW have not."""

    def __init__(
        self, matrices: NamedParameters, settings: dict[str, Any], whole: WholeMatrices, adam: torch.optim.AdamW
    ) -> None:
        super().__init__([matrices.group(**settings)], {"fused": adam.defaults["fused"]})
        self._adam = adam
        self.param_groups += adam.param_groups
        adam.state = self.state
        self.matrices = whole
        self.numbers: dict[Tensor, int] = {item.parameter: number for number, item in enumerate(matrices)}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient. Collective over the ranks that share matrices."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if self.matrix_key in group:
                self.step_matrices(group)
        self._adam.param_groups = [group for group in self.param_groups if self.matrix_key not in group]
        self._adam.step()
        return loss

    def step_matrices(self, group: dict[str, Any]) -> None:
        """Update the parameters of a group that have gradients. Called on all ranks, also where there are none."""
        raise NotImplementedError
