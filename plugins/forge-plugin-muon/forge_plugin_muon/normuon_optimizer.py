"""NorMuon as a `torch.optim.Optimizer`, usable without a Forge job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from forge_core.checkpoint.state import empty_slot
from forge_kit.optim.groups import Groups, as_groups
from forge_kit.optim.whole_matrices import Matrix
from forge_plugin_muon.optimizer import MuonOptimizer
from forge_plugin_muon.owned_state import OwnedState

MOMENT = "second_momentum_buffer"
EPS = 1e-10
"""Added to the divisors, as in the authors' code: a row of zeros stays one."""


class NorMuonOptimizer(MuonOptimizer):
    """NorMuon (Li et al. 2025) for matrices of hidden layers, AdamW for all other parameters.

    With U Muon's orthogonalised momentum (rows, columns), and v a number for each row,

        v ← β₂ v + (1 - β₂) mean of squares of each row of U;  N = U / √v;  N ← N ‖U‖ / ‖N‖

    and N takes the place of U. The state beside Muon's is v, `second_momentum_buffer`, on the owner of each matrix
    (`OwnedState` describes its slots). It is float32, or the dtype of the iteration if that is wider, as are the
    operations above.

    Args:
        matrices: as `MuonOptimizer` takes them; a group may set `beta2`, too.
        others: all other parameters.
        beta2: β₂.
        settings: further arguments of `MuonOptimizer`.
    """

    def __init__(self, matrices: Groups, others: Groups = (), *, beta2: float = 0.95, **settings: Any) -> None:
        super().__init__([{"beta2": beta2} | group for group in as_groups(matrices)], others, **settings)
        self._owned = OwnedState(self)

    def updates_of(self, group: dict[str, Any], owned: Sequence[Matrix], directions: list[Tensor]) -> Sequence[Tensor]:
        orthogonal = super().updates_of(group, owned, directions)
        return [
            self._with_equal_rows(matrix, update, group["beta2"])
            for matrix, update in zip(owned, orthogonal, strict=True)
        ]

    def _with_equal_rows(self, matrix: Matrix, update: Tensor, beta2: float) -> Tensor:
        wide = update.to(torch.promote_types(torch.float32, update.dtype))
        squares = wide.square().mean(dim=1, keepdim=True)
        average = self._owned.get(matrix, MOMENT, lambda: torch.zeros_like(squares))
        average.lerp_(squares, 1 - beta2)
        divided = wide / (average.sqrt() + EPS)
        # The average starts at zero and is not corrected for it: the common factor drops out here.
        divided *= torch.linalg.vector_norm(wide) / (torch.linalg.vector_norm(divided) + EPS)
        return divided.to(update.dtype)

    def empty_slot(self, parameter: Tensor, slot: str, size: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """See `forge_core.contracts.optimizer.PlacesState`."""
        if parameter in self.numbers and slot.startswith(MOMENT):
            return self._owned.empty_slot(parameter, slot, size, dtype)
        return empty_slot(parameter, size, dtype)
