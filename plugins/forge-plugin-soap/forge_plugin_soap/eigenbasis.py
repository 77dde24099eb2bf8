"""Orthonormal bases that follow the eigenvectors of a slowly changing matrix."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def first_basis(matrix: Tensor) -> Tensor:
    """The eigenvectors of a symmetric, positive semidefinite matrix (n, n) as columns, the largest eigenvalue first."""
    values, vectors = torch.linalg.eigh(matrix)
    return orthonormal((vectors * values).flip(1))


def next_basis(matrix: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """A basis that is nearer to the eigenvectors of `matrix`, by one step of the power method; and the order in which
    it has the columns of `basis`, the largest estimated eigenvalue first."""
    product = matrix @ basis
    order = torch.argsort((basis * product).sum(0), descending=True, stable=True)
    return orthonormal(product[:, order]), order


def orthonormal(columns: Tensor) -> Tensor:
    """The columns (n, n) made orthonormal, each against those before it.

    Where a column is a combination of those before it, its direction would be that of rounding errors, which differ
    from layout to layout. It is then any that is orthogonal to those before, but always the same one.
    """
    # LAPACK returns bases column by column, checkpoints row by row, and products of the two round otherwise.
    basis, triangle = torch.linalg.qr(columns)
    lengths = triangle.diagonal().abs()
    lost = lengths <= lengths.max() * TOLERANCE * len(lengths) * torch.finfo(columns.dtype).eps
    if isinstance(columns, FakeTensor) or not bool(lost.any()):
        return basis.contiguous()
    # To a column of zeros, Householder's method answers with what its earlier reflections leave of the unit vector.
    return torch.linalg.qr(columns.masked_fill(lost, 0))[0].contiguous()


TOLERANCE = 4
"""Times n and the precision: what is left of a column, relative to the largest, that counts as rounding errors."""
