"""The Newton-Schulz iteration on batches of matrices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

JORDAN = (3.4445, -4.7750, 2.0315)
"""Coefficients of Jordan et al. (2024), whose polynomial brings singular values close to 1 in few steps."""
TOGETHER = 1 << 24
"""Elements that are orthogonalised in one batch, or one matrix: the iteration needs about three times their memory."""


def orthogonalise(
    matrices: Sequence[Tensor], coefficients: tuple[float, float, float] = JORDAN, steps: int = 5, eps: float = 1e-7
) -> list[Tensor]:
    """Bring the singular values of each matrix close to 1 (Jordan et al. 2024).

    Iterates X <- a X + b (X Xᵀ) X + c (X Xᵀ)² X, from X divided by its norm. Matrices of one shape are batched.

    Args:
        matrices: (rows, columns) each, of one dtype, which the computation uses; not modified.
        coefficients: a, b, c.
        steps: iterations.
        eps: lower bound of the norm.

    Returns:
        A new tensor for each matrix, of its shape and dtype.
    """
    results: dict[int, Tensor] = {}
    alike: dict[torch.Size, list[int]] = {}
    for number, matrix in enumerate(matrices):
        alike.setdefault(matrix.shape, []).append(number)
    for shape, numbers in alike.items():
        count = max(1, TOGETHER // max(1, shape.numel()))
        for start in range(0, len(numbers), count):
            part = numbers[start : start + count]
            stack = torch.stack([matrices[number] for number in part])
            results.update(zip(part, _iterate(stack, coefficients, steps, eps).unbind(), strict=True))
    return [results[number] for number in range(len(matrices))]


def _iterate(x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Iterate on (n, rows, columns), which may be overwritten."""
    a, b, c = coefficients
    # X Xᵀ is square in the rows, so tall matrices are transposed for the smaller product.
    tall = x.shape[1] > x.shape[2]
    x = x.mT.contiguous() if tall else x
    # The Frobenius norm bounds the largest singular value, and the polynomial converges from [0, 1] only.
    x = x.div_(torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=eps))
    for _ in range(steps):
        gram = x @ x.mT
        # a X + (b G + c G²) X with G = X Xᵀ: each sum is computed within its product
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def fast_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the processor multiplies it natively; float32 where emulation would be slower than float32."""
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        able = torch.cpu.get_capabilities()
        native = device.type != "cpu" or bool(able.get("avx512_bf16") or able.get("amx_tile"))
    return torch.bfloat16 if native else torch.float32
