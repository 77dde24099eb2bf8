"""SOAP's state of one matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from attrs import define
from torch import Tensor

from forge_plugin_soap.eigenbasis import first_columns, next_columns, orthonormal


@define
class Preconditioner:
    """The state of a matrix (m, n) with gradient G."""

    exp_avg: Tensor
    """(m, n): average of G."""
    exp_avg_sq: Tensor
    """(m, n): average of the square of G's elements in the eigenbasis."""
    left: Tensor | None
    """(m, m): average of G Gᵀ. None: the side is longer than `max_dim`."""
    right: Tensor | None
    """(n, n): average of Gᵀ G."""
    left_basis: Tensor | None
    """(m, m): approximate eigenvectors of `left`, as columns."""
    right_basis: Tensor | None
    """(n, n): likewise of `right`."""

    @classmethod
    def started(cls, gradient: Tensor, beta: float, max_dim: int) -> Preconditioner:
        """Create the state from the first gradient; `refresh` makes the bases.

        Args:
            gradient: G (m, n).
            beta: decay of the averages of G Gᵀ and Gᵀ G.
            max_dim: longer sides are not rotated.
        """
        left, right = (
            (1 - beta) * (side @ side.mT) if side.shape[0] <= max_dim else None for side in (gradient, gradient.mT)
        )
        return cls(torch.zeros_like(gradient), torch.zeros_like(gradient), left, right, None, None)

    @classmethod
    def of(cls, slots: Mapping[str, Any], suffix: str) -> Preconditioner:
        """Rebuild the state from the slots that `slots` returned."""
        tensors: Any = (slots.get(field.name + suffix) for field in attrs.fields(cls))
        return cls(*tensors)

    def slots(self, suffix: str) -> dict[str, Tensor]:
        """Returns the tensors of this matrix, by slot."""
        tensors = attrs.asdict(self, recurse=False)
        return {name + suffix: tensor for name, tensor in tensors.items() if tensor is not None}

    def update(self, gradient: Tensor, betas: tuple[float, ...], eps: float) -> Tensor:
        """Returns Adam's step (m, n) in the eigenbasis, without the correction of averages that started at zero."""
        # The average of G stays in the parameter's own basis, where a change of the eigenbasis leaves it valid.
        self.exp_avg.lerp_(gradient, 1 - betas[0])
        self.exp_avg_sq.lerp_(self._there(gradient).square(), 1 - betas[1])
        return self._back(self._there(self.exp_avg) / self.exp_avg_sq.sqrt().add_(eps))

    def follow(self, gradient: Tensor, beta: float) -> None:
        """Add a gradient (m, n) to the averages of the preconditioner, after its update was computed."""
        if self.left is not None:
            self.left.lerp_(gradient @ gradient.mT, 1 - beta)
        if self.right is not None:
            self.right.lerp_(gradient.mT @ gradient, 1 - beta)

    def next_columns(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns for each side the columns of which `orthonormal` makes its next basis, if it is rotated."""
        left = right = None
        if self.left is not None:
            left = self._reordered(self.left, self.left_basis, dim=0)
        if self.right is not None:
            right = self._reordered(self.right, self.right_basis, dim=1)
        return left, right

    def _reordered(self, matrix: Tensor, basis: Tensor | None, dim: int) -> Tensor:
        if basis is None:
            return first_columns(matrix)
        columns, order = next_columns(matrix, basis)
        # Squares belong to directions of the basis, and are reordered with them.
        self.exp_avg_sq = self.exp_avg_sq.index_select(dim, order)
        return columns

    def _there(self, matrix: Tensor) -> Tensor:
        matrix = matrix if self.left_basis is None else self.left_basis.mT @ matrix
        return matrix if self.right_basis is None else matrix @ self.right_basis

    def _back(self, matrix: Tensor) -> Tensor:
        matrix = matrix if self.left_basis is None else self.left_basis @ matrix
        return matrix if self.right_basis is None else matrix @ self.right_basis.mT


def refresh(preconditioners: Sequence[Preconditioner]) -> None:
    """Bring the eigenbases up to date, or make the first ones. Reads the device once."""
    columns = [own.next_columns() for own in preconditioners]
    rotated = [side for sides in columns for side in sides if side is not None]
    bases = iter(orthonormal(rotated) if rotated else ())
    for own, (left, right) in zip(preconditioners, columns, strict=True):
        own.left_basis = None if left is None else next(bases)
        own.right_basis = None if right is None else next(bases)
