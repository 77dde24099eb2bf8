"""SOAP as a `torch.optim.Optimizer`, usable without a Forge job."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge_core.checkpoint.state import empty_slot
from forge_core.parallel.mesh import local_part
from forge_kit.optim.groups import Groups, as_groups
from forge_kit.optim.matrix_optimizer import WORKING_BYTES, MatrixOptimizer, matrices_in
from forge_kit.optim.whole_matrices import Matrix, WholeMatrices
from forge_kit.torch_internals import LocalAdamW
from forge_plugin_soap.preconditioner import Preconditioner, refresh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

STEP = "step"


class SOAPOptimizer(MatrixOptimizer):
    """SOAP (Vyas et al. 2024, algorithm 3) for matrices of hidden layers, AdamW for all other parameters.

    The owner of a matrix has its state, in slots `exp_avg`, `left`, …; for the third matrix that a parameter stacks, in
    `exp_avg-2`, `left-2`, …. All ranks count the gradients of a parameter, in `step`.

    Args:
        matrices: parameters of two dimensions, or of three that stack matrices, or groups of them. A group may set
            `lr`, `weight_decay`, `betas`, `eps`, `precondition_frequency` and `preconditioner_beta`.
        others: all other parameters, or groups of them, as `torch.optim.AdamW` takes them.
        lr: learning rate of matrices.
        betas: decay of the averages of the gradient and of its square; the latter in the eigenbasis.
        preconditioner_beta: decay of the averages of G Gᵀ and Gᵀ G. None: the second of `betas`.
        eps: added to the root of the averaged square.
        weight_decay: decoupled; each step subtracts lr x this x the matrix.
        precondition_frequency: updates between two corrections of the eigenbasis.
        max_dim: a longer side of a matrix is not rotated.
        adam_lr: learning rate of all other parameters; their groups may set it and the next three. None: `lr`.
        adam_betas: decay of AdamW's averages.
        adam_eps: added to the root of AdamW's averaged square.
        adam_weight_decay: weight decay of all other parameters.
        fused: whether AdamW's update is one kernel.
        working_bytes: upper bound of the bytes of whole matrices that a rank holds at a time.
        mesh: the mesh over which DTensor parameters are split, or whose ranks share the work on replicated ones.

    Raises:
        ValueError: one of `matrices` has another number of dimensions.
    """

    matrix_key = "precondition_frequency"

    def __init__(
        self,
        matrices: Groups,
        others: Groups = (),
        *,
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        preconditioner_beta: float | None = None,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        precondition_frequency: int = 10,
        max_dim: int = 10000,
        adam_lr: float | None = None,
        adam_betas: tuple[float, float] = (0.9, 0.95),
        adam_eps: float = 1e-8,
        adam_weight_decay: float = 0.01,
        fused: bool = True,
        working_bytes: int = WORKING_BYTES,
        mesh: DeviceMesh | None = None,
    ) -> None:
        adam = LocalAdamW(
            as_groups(others), lr if adam_lr is None else adam_lr, adam_betas, adam_eps, adam_weight_decay, fused=fused
        )
        settings = {
            "lr": lr,
            "weight_decay": weight_decay,
            "betas": betas,
            "eps": eps,
            "precondition_frequency": precondition_frequency,
            "preconditioner_beta": betas[1] if preconditioner_beta is None else preconditioner_beta,
        }
        groups = as_groups(matrices)
        whole = WholeMatrices(matrices_in(groups), mesh, lambda shape: _cost(shape, max_dim, precondition_frequency))
        super().__init__(groups, settings, whole, adam, working_bytes)
        self._max_dim = max_dim
        self._due: list[tuple[dict[str, Any], str]] = []
        """State of the matrices whose bases this step makes or corrects, with the suffix of their slots."""
        self._owned = {(m.parameter, m.item) for m in whole.owned(self.numbers.values())}

    def step_matrices(self, group: dict[str, Any]) -> None:
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not trained:
            return
        # On every rank, also those that own no matrix of a parameter: all must skip its first update.
        for parameter in trained:
            self.state[parameter][STEP] = self.state[parameter].get(STEP, 0) + 1
        by_number = {self.numbers[parameter]: parameter for parameter in trained}
        gradients = {parameter: local_part(parameter.grad) for parameter in trained}
        weights = {parameter: local_part(parameter) for parameter in trained}

        def precondition(owned: Sequence[Matrix], wholes: list[Tensor]) -> list[Tensor]:
            return [
                self._precondition(matrix, self.state[by_number[matrix.parameter]], gradient, group)
                for matrix, gradient in zip(owned, wholes, strict=True)
            ]

        def part(parameter: Tensor, matrix: Matrix) -> Tensor:
            return gradients[parameter][matrix.own_place]

        dtype = gradients[trained[0]].dtype
        for parameter, matrix, update in self.each_matrix(trained, dtype, part, precondition):
            updates = self.state[parameter][STEP] - 1
            if updates:  # the first gradient only initialises the preconditioner
                weight, rate = weights[parameter][matrix.own_place], group["lr"] * _debias(group["betas"], updates)
                weight.add_(update, alpha=-rate)
                # After the update and not before it, as in the authors' code.
                weight.mul_(1 - group["lr"] * group["weight_decay"])

    def _precondition(self, matrix: Matrix, state: dict[str, Any], gradient: Tensor, group: dict[str, Any]) -> Tensor:
        """Returns the update of a matrix that this rank owns; its elements are of order 1."""
        suffix = "" if matrix.item is None else f"-{matrix.item}"
        betas = (*group["betas"], group["preconditioner_beta"])
        if state[STEP] == 1:
            own = Preconditioner.started(gradient, betas[2], self._max_dim)
            # The first gradient only starts the preconditioner, as there is no basis to rotate it by
            update = torch.zeros_like(gradient)
        else:
            own = Preconditioner.of(state, suffix)
            update = own.update(gradient, betas, group["eps"])
            # After the update: the basis that a gradient is rotated by must not have been fitted to it.
            own.follow(gradient, betas[2])
        state |= own.slots(suffix)
        # Also at the first gradient, which has no bases yet
        if (state[STEP] - 1) % group["precondition_frequency"] == 0:
            self._due.append((state, suffix))
        return update

    def finish_matrices(self) -> None:
        # All at once, as the host reads from the device which matrices are singular: once, and not once for each.
        due, self._due = self._due, []
        for part in self._parts(due):
            preconditioners = [Preconditioner.of(state, suffix) for state, suffix in part]
            refresh(preconditioners)
            for (state, suffix), own in zip(part, preconditioners, strict=True):
                state.update(own.slots(suffix))

    def _parts(self, due: Sequence[tuple[dict[str, Any], str]]) -> Iterator[Sequence[tuple[dict[str, Any], str]]]:
        """Yields matrices whose sides take `working_bytes` together, or one."""
        part: list[tuple[dict[str, Any], str]] = []
        size = 0
        for state, suffix in due:
            own = Preconditioner.of(state, suffix)
            needed = sum(side.nbytes for side in (own.left, own.right) if side is not None)
            if part and size + needed > self._working_bytes:
                yield part
                part, size = [], 0
            part.append((state, suffix))
            size += needed
        if part:
            yield part

    def empty_slot(self, parameter: Tensor, slot: str, size: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """See `forge_core.contracts.optimizer.PlacesState`."""
        if parameter not in self.numbers:
            return empty_slot(parameter, size, dtype)
        _, _, item = slot.partition("-")
        if (self.numbers[parameter], int(item) if item else None) in self._owned:
            return torch.empty(size, dtype=dtype, device=parameter.device)
        return None


def _debias(betas: tuple[float, float], updates: int) -> float:
    """Returns Adam's correction for averages that started at zero."""
    return math.sqrt(1 - betas[1] ** updates) / (1 - betas[0] ** updates)


def _cost(shape: Sequence[int], max_dim: int, frequency: int) -> float:
    """Approximate multiplications of a step for a matrix.

    For each side three rotations there or back and one outer product; every `frequency` steps a product and a QR
    decomposition.
    """
    rows, columns = shape
    return sum(4 * rows * columns * side + 4 * side**3 / frequency for side in shape if side <= max_dim)
