"""Orthonormal bases that follow the eigenvectors of a slowly changing matrix."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def first_basis(matrix: Tensor) -> Tensor:
    """Returns the eigenvectors of a positive semidefinite matrix (n, n) as columns, the largest eigenvalue first."""
    values, vectors = torch.linalg.eigh(matrix)
    return orthonormal((vectors * values).flip(1))


def next_basis(matrix: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Improve a basis of the eigenvectors of `matrix` by one step of the power method.

    Args:
        matrix: symmetric, positive semidefinite (n, n).
        basis: orthonormal columns (n, n).

    Returns:
        The new basis, and the order (n,) in which it has the columns of `basis`: largest estimated eigenvalue first.
    """
    product = matrix @ basis
    order = torch.argsort((basis * product).sum(0), descending=True, stable=True)
    return orthonormal(product[:, order]), order


def orthonormal(columns: Tensor) -> Tensor:
    """Make columns (n, n) orthonormal, each against those before it.

    Where a column is a combination of those before it, its direction would be that of rounding errors, which differ
    between layouts. Such a column is replaced by a direction that is orthogonal to those before it and depends on
    nothing else.
    """
    # `contiguous` below: LAPACK returns bases in column order and checkpoints restore them in row order, and products
    # with the two are rounded differently, so that a resumed run would differ.
    basis, triangle = torch.linalg.qr(columns)
    lengths = triangle.diagonal().abs()
    lost = lengths <= lengths.max() * TOLERANCE * len(lengths) * torch.finfo(columns.dtype).eps
    if isinstance(columns, FakeTensor) or not bool(lost.any()):
        return basis.contiguous()
    # From a column of zeros, Householder's method makes the image of the unit vector under its earlier reflections.
    return torch.linalg.qr(columns.masked_fill(lost, 0))[0].contiguous()


TOLERANCE = 4
"""Factor of n x precision. Below it, a column's remainder relative to the largest counts as rounding errors."""
