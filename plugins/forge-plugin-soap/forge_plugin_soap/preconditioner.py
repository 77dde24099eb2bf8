"""SOAP's state of one matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from attrs import define
from torch import Tensor

from forge_plugin_soap.eigenbasis import first_basis, next_basis


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
        """Create the state from the first gradient.

        Args:
            gradient: G (m, n).
            beta: decay of the averages of G Gᵀ and Gᵀ G.
            max_dim: longer sides are not rotated.
        """
        left, right = (
            (1 - beta) * (side @ side.mT) if side.shape[0] <= max_dim else None for side in (gradient, gradient.mT)
        )
        bases = (None if side is None else first_basis(side) for side in (left, right))
        return cls(torch.zeros_like(gradient), torch.zeros_like(gradient), left, right, *bases)

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

    def follow(self, gradient: Tensor, beta: float, correct: bool) -> None:
        """Add a gradient to the averages of the preconditioner, after its update was computed.

        Args:
            gradient: G (m, n).
            beta: decay of the averages.
            correct: whether to bring the eigenbasis up to date.
        """
        if self.left is not None and self.left_basis is not None:
            self.left.lerp_(gradient @ gradient.mT, 1 - beta)
            if correct:
                self.left_basis, order = next_basis(self.left, self.left_basis)
                # Squares belong to directions of the basis, and are reordered with them.
                self.exp_avg_sq = self.exp_avg_sq[order]
        if self.right is not None and self.right_basis is not None:
            self.right.lerp_(gradient.mT @ gradient, 1 - beta)
            if correct:
                self.right_basis, order = next_basis(self.right, self.right_basis)
                self.exp_avg_sq = self.exp_avg_sq[:, order].contiguous()

    def _there(self, matrix: Tensor) -> Tensor:
        matrix = matrix if self.left_basis is None else self.left_basis.mT @ matrix
        return matrix if self.right_basis is None else matrix @ self.right_basis

    def _back(self, matrix: Tensor) -> Tensor:
        matrix = matrix if self.left_basis is None else self.left_basis @ matrix
        return matrix if self.right_basis is None else matrix @ self.right_basis.mT
