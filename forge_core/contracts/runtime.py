"""What losses, parallel stages, executors, loggers and storages promise to the engine.

Shapes: B sequences of a micro-batch, S positions, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Head, Model


class LossOutput(NamedTuple):
    """What a loss returns for one micro-batch. All float32 (float64 if the model is)."""

    sum: Tensor
    """() differentiable: the sum over valid positions. The engine divides by the valid tokens of the global batch."""
    count: Tensor  # type: ignore[assignment]  # the name hides a method of tuples that nobody calls
    """() number of valid positions."""
    per_sequence: tuple[Tensor, Tensor]
    """(B,) and (B,): detached sums and counts, of which per-source losses are made."""


LossFunction = Callable[["Head", "Tensor", "Batch"], LossOutput]
"""(head, hidden (B, S, D), batch) -> LossOutput."""


class ParallelStage(Protocol):
    """A built stage. More is optional:

    `describe()` says what it did to the model, for the plan of the run.
    `parameter_device` is where it keeps parameters, gradients and optimizer state, if not on the run's device.
    `split(batch)` gives this rank's part of a micro-batch to the executor, by a stage that divides sequences.
    `micro_batch(model, backward=, last=)` is a context that executors hold around the forward pass of a micro-batch
    and, with `backward`, its recomputation and backward pass (`last`: of this step). An executor that lets
    micro-batches overlap holds one around all of a step, with `last=False`: what is left to reduce is then reduced in
    `complete_gradients`.
    `complete_gradients(model)` is called once a step after the last backward, last stage first, by a stage that leaves
    gradients partial or owns their reduction.
    `executor(model, loss, stages)` is for a stage that runs the micro-batches itself; its component says so
    (`ParallelComponent.brings_executor`).
    `counted_elsewhere(model)` gives parameters that other pipeline ranks have too and count in the global norm.
    """

    def apply(self, model: Model) -> Model:
        """Transform the model, in place or not, on the meta device. Parameter names must stay the same."""
        ...


class StepOutput(NamedTuple):
    """What an executor gives back for one step (or one evaluation batch). On device, nothing waited for."""

    loss_sum: Tensor
    """() detached, float32 or wider: the sum over this rank's valid positions."""
    count: Tensor  # type: ignore[assignment]
    """() valid positions behind `loss_sum`."""
    per_sequence: tuple[Tensor, Tensor]
    """Sums and counts of all sequences of the step, in the order of the micro-batches."""


class Executor(Protocol):
    """Runs micro-batches of equal shape. The run loop cannot tell one executor from another."""

    def train_step(self, batches: Sequence[Batch], denominator: Tensor) -> StepOutput:
        """Forward and backward of all micro-batches; gradients accumulate. Each loss sum is divided by `denominator`
        (the valid tokens of the global batch, a device scalar) before backward, so reductions are plain sums."""
        ...

    def evaluate(self, batches: Sequence[Batch], measure: LossFunction | None = None) -> StepOutput:
        """Forward only, without gradients.

        Args:
            measure: what takes the place of the job's loss, such as a count of right guesses. Of its output,
                `per_sequence` is what comes back.
        """
        ...


class Logger(Protocol):
    """Receives metrics on rank 0. One more method is optional: `flush()`, called before each checkpoint, by a logger
    that keeps records in memory, since a run that is killed continues from the checkpoint and does not log those steps
    again. What it raises is a failed save."""

    def start(self, step: int) -> None:
        """The run starts after `step` completed steps: anything recorded later than that is stale. 0: from nothing, and
        whatever there is is stale."""

    def log(self, record: Mapping[str, Any]) -> None:
        """One line: `step` and numbers. Training lines have `loss`, …; evaluation lines have keys `eval/…`.

        What modules counted is in a training line under `counts`: {name: {row: list of numbers}}, `row` being a layer's
        number as a string.
        """

    def close(self) -> None:
        """The run ended, in whatever way. Called exactly once."""


class Storage(Protocol):
    """Checkpoints by step. A checkpoint is a folder that appears whole or not at all."""

    def begin(self, step: int) -> Path:
        """An empty folder to write into. Clears the storage first (see `clear`)."""
        ...

    def commit(self, step: int) -> Path:
        """Make what was written visible as the checkpoint of `step`; gives its folder."""
        ...

    def clear(self) -> None:
        """Remove what was begun and never committed, and what deletions that were cut short have left."""
        ...

    def discard(self, step: int) -> None:
        """Remove what was written for `step` and not committed, as far as that is possible."""
        ...

    def steps(self) -> Sequence[int]:
        """Steps that have a committed checkpoint, ascending."""
        ...

    def path(self, step: int) -> Path: ...
    def delete(self, step: int) -> None: ...
