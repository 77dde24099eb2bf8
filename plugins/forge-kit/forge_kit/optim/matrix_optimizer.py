"""Base of optimizers with their own update of matrices, and AdamW for all other parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from forge_core.contracts.optimizer import NamedParameter, NamedParameters
from forge_core.parallel.mesh import local_part
from forge_kit.optim.groups import Groups, as_groups
from forge_kit.optim.whole_matrices import Matrix, WholeMatrices

ROLES = ("matrix", "stack", "fused")
"""Roles of parameters that are matrices of hidden layers."""
WORKING_BYTES = 10**9
"""Default bound on the bytes of matrices that are processed together: some of the largest matrices of an 8B model, and
all matrices of a small model."""


def divide(parameters: NamedParameters) -> tuple[NamedParameters, NamedParameters]:
    """Returns the matrices of hidden layers (two dimensions, three if a parameter stacks some), and all else."""
    matrices = [item for item in parameters if _is_matrix(item)]
    return NamedParameters(matrices), NamedParameters([item for item in parameters if not _is_matrix(item)])


def _is_matrix(item: NamedParameter) -> bool:
    return item.role in ROLES and item.parameter.ndim in (2, 3)


def matrices_in(groups: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """Returns the parameters of groups of matrices, in order.

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
    """Base of an optimizer that updates matrices by `step_matrices`, and all other parameters by AdamW.

    The AdamW shares groups and state with it, so that schedules and checkpoints see a single optimizer.

    Args:
        matrices: the parameters that are updated here (`divide` returns them), or groups of them.
        settings: defaults of their groups: `lr`, `weight_decay` and others.
        whole: divides the work on them among ranks; numbered as they are in `matrices`.
        adam: the optimizer of all other parameters.
        working_bytes: bound on the bytes of whole matrices that `each_matrix` hands to a rank at a time.

    Attributes:
        matrices: `whole`.
        numbers: the number of each parameter in it.
    """

    matrix_key: ClassVar[str]
    """A key that groups of matrices have, and groups of AdamW lack."""

    def __init__(
        self,
        matrices: Groups,
        settings: dict[str, Any],
        whole: WholeMatrices,
        adam: torch.optim.AdamW,
        working_bytes: int = WORKING_BYTES,
    ) -> None:
        groups = [settings | group for group in as_groups(matrices)]
        # By this default, checkpoints place the step counters of the AdamW where its kernel expects them
        super().__init__(groups, {"fused": adam.defaults["fused"]})
        self._adam = adam
        # The same dictionaries, so that settings that a schedule writes reach the AdamW too
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
        self.finish_matrices()
        # Set again at each step: torch replaces state and groups when a state dict is loaded.
        self._adam.state = self.state
        self._adam.param_groups = [group for group in self.param_groups if self.matrix_key not in group]
        self._adam.step()
        return loss

    def step_matrices(self, group: dict[str, Any]) -> None:
        """Update the parameters of a group that have gradients. Called on all ranks, even if there are none."""
        raise NotImplementedError

    def finish_matrices(self) -> None:
        """Called once in a step, after `step_matrices` of every group."""

    def each_matrix(
        self,
        trained: Sequence[Tensor],
        dtype: torch.dtype,
        part: Callable[[Tensor, Matrix], Tensor],
        function: Callable[[Sequence[Matrix], list[Tensor]], Sequence[Tensor]],
        stacked: int = 1,
    ) -> Iterator[tuple[Tensor, Matrix, Tensor]]:
        """Applies `function` to whole matrices, in batches of at most `working_bytes` per rank. Collective.

        Memory beside the state in a step is a small multiple of this bound, whatever the size of the model.

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
        # Gives dtype and device to ranks that hold no part of a matrix
        like = torch.empty(0, dtype=dtype, device=local_part(trained[0]).device)
        for batch in self.matrices.batches(by_number, self._working_bytes // dtype.itemsize, stacked):
            owned = [matrix for matrix in batch if matrix.owner == self.matrices.rank]

            def part_of(matrix: Matrix) -> Tensor:
                return part(by_number[matrix.parameter], matrix)

            def work(wholes: list[Tensor], owned: Sequence[Matrix] = owned) -> Sequence[Tensor]:
                return function(owned, wholes)

            for matrix, piece in self.matrices.each(batch, part_of, work, like):
                yield by_number[matrix.parameter], matrix, piece
