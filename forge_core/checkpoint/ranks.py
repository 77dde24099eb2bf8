"""Exchange between the ranks of a run while they save or load, so that all of them reach the same result.

If one rank raised while the others continued, these would be left waiting in their next collective. An error is
therefore sent with the result, and raised on every rank or on none. `launch.rendezvous` does the same before a process
group exists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from attrs import frozen

from forge_core.checkpoint.storage import describe_fault
from forge_core.contracts.errors import CheckpointError

T = TypeVar("T")


@frozen
class Ranks:
    """All ranks of the run. A process alone needs no process group."""

    group: Any = None
    """Their process group; None: the default one."""

    @property
    def world_size(self) -> int:
        """Ranks of the group; 1 where no process group exists."""
        return dist.get_world_size(self.group) if dist.is_initialized() else 1

    @property
    def rank(self) -> int:
        """Number of this rank in the group; 0 where no process group exists."""
        return dist.get_rank(self.group) if dist.is_initialized() else 0

    def scatter(self, values: Sequence[T]) -> T:
        """One of rank 0's `values` for each rank; other ranks pass none. Collective."""
        if self.world_size == 1:
            return values[0]
        received: list[Any] = [None]
        dist.scatter_object_list(received, list(values) if self.rank == 0 else None, src=0, group=self.group)
        return received[0]

    def on_rank0(self, action: Callable[[], T]) -> T:
        """Call `action` on rank 0; returns its result, or raises a `CheckpointError`, on every rank. Collective."""
        outcome: list[Any] = [None, ""]
        cause: Exception | None = None
        if self.rank == 0:
            try:
                outcome[0] = action()
            except Exception as error:
                cause, outcome[1] = error, describe_fault(error)
        if self.world_size > 1:
            dist.broadcast_object_list(outcome, src=0, group=self.group)
        result, fault = outcome
        if fault:
            raise CheckpointError(fault) from cause
        return result

    def on_each(self, action: Callable[[], T]) -> T:
        """Call `action` on every rank; returns its result on this one, or raises as `on_all`. Collective."""
        results: list[T] = []
        self.on_all(lambda: results.append(action()))
        return results[0]

    def on_all(self, action: Callable[[], T]) -> list[T]:
        """Call `action` on every rank; returns all results on rank 0, an empty list elsewhere. Collective.

        Raises a `CheckpointError` on every rank when it failed on some rank; names each of these.
        """
        result, fault, cause = None, "", None
        try:
            result = action()
        except Exception as error:
            fault, cause = f"rank {self.rank}: {describe_fault(error)}", error
        outcomes: list[Any] | None = [(result, fault)]
        if self.world_size > 1:
            # Gathered on rank 0 only: the plans of 1,024 ranks are large, and no other rank needs them
            outcomes = [None] * self.world_size if self.rank == 0 else None
            dist.gather_object((result, fault), outcomes, dst=0, group=self.group)
        faults = self.on_rank0(lambda: "; ".join(fault for _, fault in outcomes or () if fault))
        if faults:
            raise CheckpointError(faults) from cause
        return [result for result, _ in outcomes or ()]
