"""Orthonormal bases that follow the eigenvectors of a slowly changing matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forge_kit.torch_internals import FakeTensor


def first_columns(matrix: Tensor) -> Tensor:
    """Returns the eigenvectors of a positive semidefinite matrix (n, n) as columns, the largest eigenvalue first.

    Their lengths are the eigenvalues; `orthonormal` makes a basis of them.
    """
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values).flip(1)


def next_columns(matrix: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Improve a basis of the eigenvectors of `matrix` by one step of the power method.

    Args:
        matrix: symmetric, positive semidefinite (n, n).
        basis: orthonormal columns (n, n).

    Returns:
        Columns from which `orthonormal` makes the new basis, and the order (n,) in which they follow the columns of
        `basis`: largest estimated eigenvalue first.
    """
    product = matrix @ basis
    # Stable: equal estimates leave columns where they are, on every device
    order = torch.argsort((basis * product).sum(0), descending=True, stable=True)
    return product[:, order], order


def orthonormal(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Make the columns of each matrix (n, n) orthonormal, each against those before it. Reads the device once.

    If a column is a linear combination of earlier columns, its direction would be determined by rounding errors, which
    differ between layouts. Such a column is replaced by a direction that is orthogonal to the earlier columns and
    depends on nothing else.
    """
    # `contiguous` below: LAPACK returns bases in column order and checkpoints restore them in row order, and products
    # with the two are rounded differently, so that a resumed run would differ.
    bases, lost = zip(*map(_decompose, matrices), strict=True)
    # A planned step has no values to read
    if isinstance(matrices[0], FakeTensor):
        return [basis.contiguous() for basis in bases]
    # From a column of zeros, Householder's method makes the image of the unit vector under its earlier reflections. A
    # second decomposition of every matrix, without asking which need one, would double the work.
    singular = torch.stack([columns.any() for columns in lost]).tolist()
    return [
        (torch.linalg.qr(matrix.masked_fill(columns, 0))[0] if again else basis).contiguous()
        for matrix, basis, columns, again in zip(matrices, bases, lost, singular, strict=True)
    ]


def _decompose(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Returns orthonormal columns, and (n,) which of them have the direction of rounding errors."""
    basis, triangle = torch.linalg.qr(matrix)
    lengths = triangle.diagonal().abs()
    return basis, lengths <= lengths.max() * TOLERANCE * len(lengths) * torch.finfo(matrix.dtype).eps


TOLERANCE = 4
"""Factor of n x precision. Below it, a column's remainder relative to the largest counts as rounding errors."""
