"""Contracts of losses, stages, executors, loggers and storages. Shapes: B sequences, S positions, D width."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from attrs import frozen

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Head, Model


class LossOutput(NamedTuple):
    """Output of a loss for one micro-batch, all float32 (float64 if the model is)."""

    sum: Tensor
    """() differentiable: the sum over valid positions. The engine divides by the valid tokens of the global batch."""
    count: Tensor  # type: ignore[assignment]  # the name hides a method of tuples that nobody calls
    """() number of valid positions."""
    per_sequence: tuple[Tensor, Tensor]
    """(B,) and (B,): detached sums and counts, from which per-source losses are computed."""


LossFunction = Callable[["Head", "Tensor", "Batch"], LossOutput]
"""(head, hidden (B, S, D), batch) -> LossOutput."""


class ParallelStage:
    """A transform of the model, as a `ParallelComponent` builds it, and what it adds to each step.

    Derive from it and override what the stage needs. Names of a stage's own start with an underscore.
    """

    # Another public name is refused when the stage is built (`parallel.stages.check_contract`): a misspelt
    # `complete_gradients` would never be called, and gradients would stay partial in silence.

    parameter_device: torch.device | None = None
    """Where the stage keeps parameters, gradients and optimizer state; None: on the run's device."""

    def apply(self, model: Model) -> Model:
        """Transform the model, on the meta device and in place or not; parameter names must stay the same."""
        return model

    def describe(self) -> str:
        """Returns what the stage did to the model, for the summary of the run; empty: nothing worth a line."""
        return ""

    def micro_batch(self, model: Model, *, backward: bool, last: bool) -> AbstractContextManager[Any]:
        """A context that executors hold around the forward pass of a micro-batch.

        Args:
            model: after all stages.
            backward: whether the context also spans recomputation and the backward pass.
            last: whether this is the last micro-batch of its step. False around a whole step if the executor overlaps
                micro-batches: the remaining gradients are then reduced in `complete_gradients`.
        """
        return nullcontext()

    def split(self, batch: Batch) -> Batch:
        """Returns this rank's part of a micro-batch; overridden by a stage that divides sequences."""
        return batch

    def sum_over_runs(self, sums: Tensor) -> int:
        """Sum (n,) float64 in place over runs of `part_of_batch`: tokens, then metrics. Returns how many take part."""
        return 1

    def complete_gradients(self, model: Model) -> None:
        """Sum what the backward passes left partial; called once a step, in the reverse of the order of `apply`."""
        # A hook of autograd would have to know which backward pass is the last, and their order is not the stages'.

    def executor(self, model: Model, loss: LossFunction, stages: Sequence[ParallelStage]) -> Executor | None:
        """Returns an executor if the component has `brings_executor`: the stage runs the micro-batches itself."""
        return None

    def counted_elsewhere(self, model: Model) -> Iterable[nn.Parameter]:
        """Returns parameters of this rank that another pipeline rank has too and counts in the global norm."""
        return ()


class StepOutput(NamedTuple):
    """Output of an executor for one step (or one evaluation batch). On the device, without a wait."""

    loss_sum: Tensor
    """() detached, float32 or wider: the sum over this rank's valid positions."""
    count: Tensor  # type: ignore[assignment]
    """() valid positions behind `loss_sum`."""
    per_sequence: tuple[Tensor, Tensor]
    """Sums and counts of all sequences of the step, in the order of the micro-batches."""


class Executor(Protocol):
    """Runs micro-batches of equal shape. The run loop cannot tell one executor from another."""

    def train_step(self, batches: Sequence[Batch], denominator: Tensor) -> StepOutput:
        """Forward and backward of the step's micro-batches on this rank; gradients accumulate."""
        # Each loss sum is divided by `denominator` (), the valid tokens of the global batch, before its backward pass,
        # so that every reduction of gradients is a plain sum.

    def evaluate(self, batches: Sequence[Batch], measure: LossFunction | None = None) -> StepOutput:
        """Forward only; `measure` replaces the job's loss, for example by a count of right predictions."""
        # A parameter and not a call of the model: under `pp`, `cp` and `tp` only the executor can run it.


class Logger(Protocol):
    """Receives metrics on rank 0. One that keeps records in memory implements `Flushes` too."""

    def start(self, step: int) -> None:
        """The run starts after `step` completed steps: anything recorded later than that is stale."""

    def log(self, record: Mapping[str, Any]) -> None:
        """One line: `step` and numbers. Training lines have `loss`, …; evaluation lines have keys `eval/…`.

        Counts of modules are in a training line under `counts`: {name: {layer's number as a string: numbers}}.
        """

    def close(self) -> None:
        """The run ended, in whatever way. Called exactly once."""


@runtime_checkable
class Flushes(Protocol):
    """A logger that keeps records in memory."""

    def flush(self) -> None:
        """Put all records where they outlive the process. Called before each checkpoint; raising fails the save."""
        # A run that is killed continues from the checkpoint, and does not log the steps before it again.


@runtime_checkable
class TakesArtifacts(Protocol):
    """A logger that keeps or sends files, such as pictures, samples and profiles."""

    def artifact(self, path: Path, name: str, step: int) -> None:
        """Take the file `path` as it is now, after `step` steps: it may be rewritten or removed later."""


@runtime_checkable
class LearnsEnd(Protocol):
    """A logger that distinguishes runs that finished from runs that stopped or failed."""

    def end(self, code: int, reason: str) -> None:
        """Before `close`: an `ExitCode`, and a reason unless all steps are done. With 0, it ended for good before."""


@frozen
class State:
    """Contents of a checkpoint: tensors by name, and plain types."""

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]


class Storage(Protocol):
    """Checkpoints by step. A checkpoint is a folder that appears whole or not at all."""

    def begin(self, step: int) -> Path:
        """Returns an empty folder to write into. Clears the storage first (see `clear`)."""

    def commit(self, step: int) -> Path:
        """Make what was written visible as the checkpoint of `step`. Returns its folder."""

    def clear(self) -> None:
        """Remove what was begun and never committed, and the remains of deletions that were cut short."""

    def discard(self, step: int) -> None:
        """Try to remove what was written for `step` and not committed."""

    def steps(self) -> Sequence[int]:
        """Steps that have a committed checkpoint, ascending."""

    def path(self, step: int) -> Path:
        """Returns the folder of the checkpoint of `step`."""
        ...

    def delete(self, step: int) -> None:
        """Remove the checkpoint of `step`, so that no part of it is ever taken for a checkpoint."""
        ...


class SpreadStorage(ABC):
    """Base of storages whose checkpoints are on no file system shared by all ranks, but in a bucket or nodes' memory.

    Its methods and the methods of `Storage` are called on every rank; an error on one is raised on all. The manifest is
    in rank 0's folder when `commit` is called. A process that never calls `join` (a command's) reads alone.
    """

    opened: ClassVar[dict[Path, tuple[SpreadStorage, int]]] = {}
    """Absolute folders of all checkpoints that this process may read, with storage and step: readers fetch first."""

    def path(self, step: int) -> Path:
        """Returns the folder in which this rank finds the files of a checkpoint that it has written or fetched."""
        folder = self.folder(step)
        self.opened[folder.absolute()] = self, step  # relative, it would be another run's elsewhere
        return folder

    # All of them abstract: one that was misspelt, or forgotten, would be missed only when a machine is lost.

    @abstractmethod
    def folder(self, step: int) -> Path:
        """Returns what `path` returns. Ranks of a machine may share it."""

    @abstractmethod
    def join(self, gather: Callable[[Any], list[Any]]) -> None:
        """Called before `steps` when ranks start or continue together. `gather` returns a value of every rank."""

    @abstractmethod
    def publish(self, step: int) -> None:
        """Put this rank's files, now in the folder of `begin`, where others find them, before any rank commits."""

    @abstractmethod
    def fetch(self, step: int, names: Sequence[str]) -> None:
        """Bring files of a checkpoint, intact by the SHA-256 of its manifest, into its folder. Called by any thread."""

    @abstractmethod
    def size(self, step: int, name: str) -> int:
        """Returns the bytes of a file of a checkpoint, which need not be fetched; or raises a `FileNotFoundError`."""

    @abstractmethod
    def close(self) -> None:
        """Finish all work in the background: the run ends well, and everything is saved."""
