"""Exchange between the ranks of a run while they save or load, so that all of them come to the same result."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from attrs import frozen

from forge_core.contracts.errors import CheckpointError

T = TypeVar("T")


@frozen
class Ranks:
    """All ranks of the run. A process alone needs no process group."""

    group: Any = None
    """Their process group; None: the default one."""

    @property
    def world_size(self) -> int:
        dist = _distributed()
        return dist.get_world_size(self.group) if dist and dist.is_initialized() else 1

    @property
    def rank(self) -> int:
        dist = _distributed()
        return dist.get_rank(self.group) if dist and dist.is_initialized() else 0

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in order, on every rank. Collective."""
        if self.world_size == 1:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        _distributed().all_gather_object(gathered, value, group=self.group)
        return gathered

    def scatter(self, values: Sequence[T]) -> T:
        """One of rank 0's `values` for each rank; other ranks pass none. Collective."""
        if self.world_size == 1:
            return values[0]
        received: list[Any] = [None]
        source = list(values) if self.rank == 0 else None
        _distributed().scatter_object_list(received, source, src=0, group=self.group)
        return received[0]

    def on_rank0(self, action: Callable[[], T]) -> T:
        """Call `action` on rank 0; returns its result on every rank. Collective.

        Raises:
            CheckpointError: on every rank, when it failed on rank 0.
        """
        outcome: list[Any] = [None, ""]
        cause: Exception | None = None
        if self.rank == 0:
            try:
                outcome[0] = action()
            except Exception as error:
                cause, outcome[1] = error, describe_fault(error)
        if self.world_size > 1:
            _distributed().broadcast_object_list(outcome, src=0, group=self.group)
        result, fault = outcome
        if fault:
            raise CheckpointError(fault) from cause
        return result

    def on_all(self, action: Callable[[], T]) -> list[T]:
        """Call `action` on every rank; returns all results on rank 0, an empty list elsewhere. Collective.

        Raises:
            CheckpointError: on every rank, when it failed on some rank; names each of these.
        """
        result, fault, cause = None, "", None
        try:
            result = action()
        except Exception as error:
            # Not raised yet: the others would wait for this rank in the next call
            fault, cause = f"rank {self.rank}: {describe_fault(error)}", error
        outcomes: list[Any] | None = [(result, fault)]
        if self.world_size > 1:
            outcomes = [None] * self.world_size if self.rank == 0 else None
            _distributed().gather_object((result, fault), outcomes, dst=0, group=self.group)
        faults = self.on_rank0(lambda: "; ".join(fault for _, fault in outcomes or () if fault))
        if faults:
            raise CheckpointError(faults) from cause
        return [result for result, _ in outcomes or ()]


def _distributed() -> Any:
    """torch.distributed, if anything has imported it: without it there is no process group, and manifests can be read
    without the seconds that torch takes."""
    return sys.modules.get("torch.distributed")


def describe_fault(error: BaseException) -> str:
    """An exception in words; our own need no class name before theirs."""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
