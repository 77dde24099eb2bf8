"""State of matrices that only the rank which computes on them holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forge_kit.optim.whole_matrices import Matrix

if TYPE_CHECKING:
    from forge_kit.optim.matrix_optimizer import MatrixOptimizer


class OwnedState:
    """State of whole matrices in an optimizer, on the owner of each.

    It is part of the state of the parameter, in a slot `NAME`; for the third matrix that a parameter stacks, in
    `NAME-2`. A checkpoint has each slot once, so that a run may continue under a layout with other owners.

    Args:
        optimizer: has the state. Not its `state`, which torch replaces when a state dict is loaded.
    """

    def __init__(self, optimizer: MatrixOptimizer) -> None:
        self._optimizer = optimizer
        self._parameters = {number: parameter for parameter, number in optimizer.numbers.items()}
        self._owned = {(matrix.parameter, matrix.item) for matrix in optimizer.matrices.owned(self._parameters)}

    def get(self, matrix: Matrix, name: str, create: Callable[[], Tensor]) -> Tensor:
        """Returns the tensor `name` of a matrix that this rank owns, and creates it the first time."""
        state = self._optimizer.state[self._parameters[matrix.parameter]]
        slot = name if matrix.item is None else f"{name}-{matrix.item}"
        if slot not in state:
            state[slot] = create()
        tensor: Tensor = state[slot]
        return tensor

    def empty_slot(self, parameter: Tensor, slot: str, size: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """See `forge_core.contracts.optimizer.PlacesState`, for a slot of the kind above."""
        _, _, item = slot.partition("-")
        if (self._optimizer.numbers[parameter], int(item) if item else None) in self._owned:
            return torch.empty(size, dtype=dtype, device=parameter.device)
        return None
