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
    """(m, m): average of G Gᵀ. None: the side is too long."""
    right: Tensor | None
    """(n, n): average of Gᵀ G."""
    left_basis: Tensor | None
    """(m, m): about the eigenvectors of `left`, as columns."""
    right_basis: Tensor | None
    """(n, n)"""

    @classmethod
    def started(cls, gradient: Tensor, beta: float, max_dim: int) -> Preconditioner:
        """From the first gradient.

        Args:
            max_dim: longer sides keep their own basis.
        """
        left, right = (
            (1 - beta) * (side @ side.mT) if side.shape[0] <= max_dim else None for side in (gradient, gradient.mT)
        )
        bases = (None if side is None else first_basis(side) for side in (left, right))
        return cls(torch.zeros_like(gradient), torch.zeros_like(gradient), left, right, *bases)

    @classmethod
    def of(cls, slots: Mapping[str, Any], suffix: str) -> Preconditioner:
        """The state that `slots` returned."""
        tensors: Any = (slots.get(field.name + suffix) for field in attrs.fields(cls))
        return cls(*tensors)

    def slots(self, suffix: str) -> dict[str, Tensor]:
        """The tensors that this matrix has, by slot."""
        tensors = attrs.asdict(self, recurse=False)
        return {name + suffix: tensor for name, tensor in tensors.items() if tensor is not None}

    def update(self, gradient: Tensor, betas: tuple[float, ...], eps: float) -> Tensor:
        """Adam's step in the eigenbasis, without the correction of averages that started at zero."""
        self.exp_avg.lerp_(gradient, 1 - betas[0])
        self.exp_avg_sq.lerp_(self._there(gradient).square(), 1 - betas[1])
        return self._back(self._there(self.exp_avg) / self.exp_avg_sq.sqrt().add_(eps))

    def follow(self, gradient: Tensor, beta: float, correct: bool) -> None:
        """Take a gradient into the preconditioner, once it has been used: a step must not see its own.

        Args:
            correct: whether to bring the eigenbasis up to date.
        """
        if self.left is not None and self.left_basis is not None:
            self.left.lerp_(gradient @ gradient.mT, 1 - beta)
            if correct:
                self.left_basis, order = next_basis(self.left, self.left_basis)
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
