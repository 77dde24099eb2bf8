"""Optimizers that step whole matrices in a way of their own, and every other parameter by AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from forge_core.contracts.optimizer import NamedParameter, NamedParameters
from forge_core.parallel.mesh import local_part
from forge_kit.groups import Groups, as_groups
from forge_kit.whole_matrices import Matrix, WholeMatrices

ROLES = ("matrix", "stack", "fused")
"""Roles of parameters that are matrices of hidden layers."""
WORKING_BYTES = 10**9
"""Default bound on the bytes of the matrices that are worked on at a time: some of the largest matrices of an 8B model,
and all of a small model at once."""


def divide(parameters: NamedParameters) -> tuple[NamedParameters, NamedParameters]:
    """Matrices of hidden layers, which have two dimensions, or three where a parameter stacks some; and all else."""
    matrices = [item for item in parameters if _is_matrix(item)]
    return NamedParameters(matrices), NamedParameters([item for item in parameters if not _is_matrix(item)])


def _is_matrix(item: NamedParameter) -> bool:
    return item.role in ROLES and item.parameter.ndim in (2, 3)


def matrices_in(groups: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """The parameters of groups of matrices, in order.

    Raises:
        ValueError: one is neither a matrix nor a stack of them.
    """
    parameters = [parameter for group in groups for parameter in group["params"]]
    for parameter in parameters:
        if parameter.ndim not in (2, 3):
            shape = list(parameter.shape)
            raise ValueError(f"a parameter of shape {shape} is no matrix; pass it in `others`, which AdamW steps")
    return parameters


class MatrixOptimizer(torch.optim.Optimizer):
    """Base of an optimizer that steps matrices in a way of its own (`step_matrices`), and leaves all other parameters
    to an AdamW, which shares groups and state with it.

    Args:
        matrices: the parameters that are stepped here (`divide` returns them), or groups of them.
        settings: of their groups, unless they have their own: `lr`, `weight_decay` and others.
        whole: who works on which of them, numbered as they are in `matrices`.
        adam: of all other parameters.
        working_bytes: bound on the bytes of whole matrices that `each_matrix` hands to a rank at a time.

    Attributes:
        matrices: `whole`.
        numbers: the number in it of each parameter.
    """

    matrix_key: ClassVar[str]
    """A key that groups of matrices have, and those of AdamW have not."""

    def __init__(
        self,
        matrices: Groups,
        settings: dict[str, Any],
        whole: WholeMatrices,
        adam: torch.optim.AdamW,
        working_bytes: int = WORKING_BYTES,
    ) -> None:
        groups = [settings | group for group in as_groups(matrices)]
        super().__init__(groups, {"fused": adam.defaults["fused"]})
        self._adam = adam
        self.param_groups += adam.param_groups
        adam.state = self.state
        self.matrices = whole
        self.numbers: dict[Tensor, int] = {parameter: i for i, parameter in enumerate(matrices_in(groups))}
        self._working_bytes = working_bytes

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient. Collective over the ranks that share matrices."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if self.matrix_key in group:
                self.step_matrices(group)
        self._adam.param_groups = [group for group in self.param_groups if self.matrix_key not in group]
        self._adam.step()
        return loss

    def step_matrices(self, group: dict[str, Any]) -> None:
        """Update the parameters of a group that have gradients. Called on all ranks, also where there are none."""
        raise NotImplementedError

    def each_matrix(
        self,
        trained: Sequence[Tensor],
        dtype: torch.dtype,
        part: Callable[[Tensor, Matrix], Tensor],
        function: Callable[[Sequence[Matrix], list[Tensor]], Sequence[Tensor]],
        stacked: int = 1,
    ) -> Iterator[tuple[Tensor, Matrix, Tensor]]:
        """Results of `function` on whole matrices, in batches of at most `working_bytes` a rank. Collective.

        Memory beside the state in a step is some times this bound, whatever the size of the model.

        Args:
            trained: parameters with gradients; the same on all ranks.
            dtype: of the parts.
            part: (parameter, matrix) -> this rank's part of the input of `function`.
            function: from matrices that this rank owns, and the whole tensors (rows, columns) made of their parts, to
                tensors of the same shapes and dtype.
            stacked: elements of matrices of one shape that `function` computes together; see `WholeMatrices.batches`.

        Yields:
            A parameter, the matrix, and this rank's part of the result, for each matrix of which it holds a part.
        """
        if not trained:
            return
        by_number = {self.numbers[parameter]: parameter for parameter in trained}
        like = torch.empty(0, dtype=dtype, device=local_part(trained[0]).device)
        for batch in self.matrices.batches(by_number, self._working_bytes // dtype.itemsize, stacked):
            owned = [matrix for matrix in batch if matrix.owner == self.matrices.rank]

            def part_of(matrix: Matrix) -> Tensor:
                return part(by_number[matrix.parameter], matrix)

            def work(wholes: list[Tensor], owned: Sequence[Matrix] = owned) -> Sequence[Tensor]:
                return function(owned, wholes)

            for matrix, piece in self.matrices.each(batch, part_of, work, like):
                yield by_number[matrix.parameter], matrix, piece
