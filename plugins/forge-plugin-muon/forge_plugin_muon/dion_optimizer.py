"""Dion as a `torch.optim.Optimizer`, usable without a Forge job."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge_core.checkpoint.state import empty_slot
from forge_core.parallel.mesh import local_part
from forge_kit.optim.groups import Groups, as_groups, names_in
from forge_kit.optim.matrix_optimizer import WORKING_BYTES, MatrixOptimizer, matrices_in
from forge_kit.optim.whole_matrices import Matrix, WholeMatrices
from forge_kit.torch_internals import LocalAdamW
from forge_plugin_muon.optimizer import ADAM_SHARE
from forge_plugin_muon.owned_state import OwnedState

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

RIGHT = "right_factor"
MOMENTUM = "momentum_buffer"


NOISE = 4
"""Lengths up to this many times the usual rounding of a product, relative to the largest, are rounding."""


class DionOptimizer(MatrixOptimizer):
    """Dion (Ahn et al. 2025, algorithm 1) for matrices of hidden layers, AdamW for all other parameters.

    With gradient G, momentum M, right factor Q (columns, r) and matrix W (rows, columns),

        B = M + G;  P = orthonormal columns of B Q, by a QR decomposition;  R = Bᵀ P;  M ← B - (1 - μ) P Rᵀ
        Q ← R with columns of length 1;  W ← (1 - lr λ) W - lr √(rows / columns) P Qᵀ

    The owner of a matrix has `momentum_buffer` and `right_factor` (`OwnedState` describes their slots), in the dtype of
    the parameter; the decomposition is float32, or wider if the parameter is. The first Q is drawn by the parameter's
    name, so that it is the same under every layout.

    Args:
        matrices: parameters of two dimensions, or of three that stack matrices, or groups of them. A group may set
            `lr`, `momentum`, `weight_decay` and `eps`.
        others: all other parameters, or groups of them, as `torch.optim.AdamW` takes them.
        lr: learning rate of matrices.
        momentum: μ.
        weight_decay: λ.
        rank_fraction: r as a share of the shorter side, rounded up.
        eps: added to the length of a column of R that is divided by it.
        adam_lr: learning rate of all other parameters; their groups may set it and the next three. None: a share of
            `lr`, `forge_plugin_muon.optimizer.ADAM_SHARE["original"]`.
        adam_betas: decay of AdamW's averages.
        adam_eps: added to the root of AdamW's averaged square.
        adam_weight_decay: weight decay of all other parameters.
        fused: whether AdamW's update is one kernel.
        working_bytes: upper bound of the bytes of whole matrices that a rank holds at a time.
        mesh: the mesh over which DTensor parameters are split, or whose ranks share the work on replicated ones.

    Raises:
        ValueError: one of `matrices` has another number of dimensions.
    """

    matrix_key = "momentum"

    def __init__(
        self,
        matrices: Groups,
        others: Groups = (),
        *,
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        rank_fraction: float = 0.25,
        eps: float = 1e-8,
        adam_lr: float | None = None,
        adam_betas: tuple[float, float] = (0.9, 0.95),
        adam_eps: float = 1e-8,
        adam_weight_decay: float = 0.1,
        fused: bool = True,
        working_bytes: int = WORKING_BYTES,
        mesh: DeviceMesh | None = None,
    ) -> None:
        adam_lr = ADAM_SHARE["original"] * lr if adam_lr is None else adam_lr
        adam = LocalAdamW(as_groups(others), adam_lr, adam_betas, adam_eps, adam_weight_decay, fused=fused)
        settings = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "eps": eps}
        groups = as_groups(matrices)
        parameters = matrices_in(groups)
        whole = WholeMatrices(parameters, mesh, lambda shape: _cost(shape, rank_fraction))
        super().__init__(groups, settings, whole, adam, working_bytes)
        self._rank_fraction = rank_fraction
        names = names_in(groups)
        self._names = [names[parameter] for parameter in parameters]
        self._owned = OwnedState(self)

    def step_matrices(self, group: dict[str, Any]) -> None:
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not trained:
            return
        weights = {parameter: local_part(parameter) for parameter in trained}
        # The gradient of a parameter may be narrower, and `each_matrix` takes one dtype
        dtype = weights[trained[0]].dtype

        def part(parameter: Tensor, matrix: Matrix) -> Tensor:
            return local_part(parameter.grad)[matrix.own_place].to(dtype)

        def updates(owned: Sequence[Matrix], gradients: list[Tensor]) -> list[Tensor]:
            pairs = zip(owned, gradients, strict=True)
            return [self._update(matrix, gradient, group) for matrix, gradient in pairs]

        for parameter, matrix, update in self.each_matrix(trained, dtype, part, updates):
            weight = weights[parameter][matrix.own_place]
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            rows, columns = matrix.shape
            weight.add_(update, alpha=-group["lr"] * math.sqrt(rows / columns))

    def _update(self, matrix: Matrix, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        """Returns P Qᵀ of a matrix that this rank owns, and replaces M and Q."""
        momentum = self._owned.get(matrix, MOMENTUM, lambda: torch.zeros_like(gradient))
        right = self._owned.get(matrix, RIGHT, lambda: self._first_factor(matrix, gradient))
        wide = torch.promote_types(torch.float32, gradient.dtype)
        momentum.add_(gradient)
        # In float32: torch has no QR decomposition in 16 bits
        left = torch.linalg.qr((momentum @ right).to(wide))[0].to(gradient.dtype)
        projected = momentum.mT @ left
        momentum.addmm_(left, projected.mT, alpha=group["momentum"] - 1)
        projected = projected.to(wide)
        lengths = torch.linalg.vector_norm(projected, dim=0, keepdim=True)
        # Of a matrix of lower rank than r, QR makes unit vectors of rounding, which each layout has another of: they
        # are no part of the update, and Q keeps its columns. No branch, which the host would have to wait for.
        rounding = NOISE * torch.finfo(wide).eps * math.sqrt(sum(momentum.shape))
        known = lengths > lengths.amax() * rounding
        unit = (projected / (lengths + group["eps"])).where(known, 0).to(gradient.dtype)
        # In place, so that Q stays row by row in memory, as a checkpoint returns it: products of another order are
        # rounded differently, and a run that continues would leave the curve.
        right.copy_(unit.where(known, right))
        return left @ unit.mT

    def _first_factor(self, matrix: Matrix, like: Tensor) -> Tensor:
        """Returns normal random numbers (columns, r), drawn on the host: its generator is the same beside any GPU."""
        text = f"{self._names[matrix.parameter]} {matrix.item}"
        # Not `hash`, which differs from process to process for strings
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        size = (matrix.shape[1], rank_of(matrix.shape, self._rank_fraction))
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(size, generator=generator, device="cpu").to(like)

    def empty_slot(self, parameter: Tensor, slot: str, size: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """See `forge_core.contracts.optimizer.PlacesState`."""
        if parameter in self.numbers:
            return self._owned.empty_slot(parameter, slot, size, dtype)
        return empty_slot(parameter, size, dtype)


def rank_of(shape: Sequence[int], fraction: float) -> int:
    """Returns the rank of the update of a matrix (rows, columns)."""
    # Less a little, so that 0.1 x 30, which floating point makes 3.0000000000000004, is 3
    return max(1, math.ceil(fraction * min(shape) - 1e-9))


def _cost(shape: Sequence[int], fraction: float) -> float:
    """Multiplications of a step: four products of the matrix with r vectors, and a QR decomposition (rows, r)."""
    rank = rank_of(shape, fraction)
    return 4 * math.prod(shape) * rank + 4 * shape[0] * rank**2
