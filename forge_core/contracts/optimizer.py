"""What schedules and optimizers with weights or state of their own promise to the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Schedule = Callable[[int, int], float]
"""(step, total steps) -> factor; pure. Step 0 is the first update."""


@runtime_checkable
class HasEvaluationWeights(Protocol):
    """An optimizer whose weights for evaluation are others than those it trains, such as their average.

    Evaluation runs between `eval()` and `train()`. A checkpoint holds both kinds: training goes on from the one, and
    generation, export and `[checkpoint.load]` take the other.
    """

    def eval(self) -> None:
        """Put the weights for evaluation into the parameters."""
        ...

    def train(self) -> None:
        """Put back the weights that were there before `eval()`, to the bit."""
        ...

    def evaluation_weights(self) -> Mapping[Tensor, Tensor]:
        """By parameter, sharded like it; parameters that are evaluated as they are may be left out. For a checkpoint,
        which copies them. Changes nothing."""
        ...

    def load_evaluation_weights(self, weights: Mapping[Tensor, Tensor]) -> None:
        """Take back what a checkpoint has of them, after state and parameters were loaded. An optimizer that derives
        them from those ignores the call."""
        ...


@runtime_checkable
class PlacesState(Protocol):
    """An optimizer whose state is not placed as by default (`forge_core.checkpoint.state.empty_slot`): split like its
    parameter where it has that shape, else whole on every rank."""

    def empty_slot(self, parameter: Tensor, slot: str, size: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """Memory for what a checkpoint has of a parameter's state: a tensor of this size, a DTensor where ranks have
        parts of it. None: this rank keeps none of it.

        Args:
            parameter: one of the optimizer's.
            size, dtype: as the checkpoint has it.

        Raises:
            CheckpointError: the checkpoint's state does not fit this optimizer.
        """
        ...
