"""What the ranks of a run tell each other while they save or load."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from attrs import frozen

from forge_core.contracts.errors import CheckpointError

T = TypeVar("T")


@frozen
class Ranks:
    """All ranks of the run. A process alone needs no process group."""

    group: Any = None
    """The process group for what they tell each other; None: the default one."""

    @property
    def count(self) -> int:
        dist = _distributed()
        return dist.get_world_size(self.group) if dist and dist.is_initialized() else 1

    @property
    def number(self) -> int:
        """Of this rank."""
        dist = _distributed()
        return dist.get_rank(self.group) if dist and dist.is_initialized() else 0

    def gather(self, value: T) -> list[T]:
        """What every rank has to say, in the order of ranks. Collective."""
        if self.count == 1:
            return [value]
        gathered: list[Any] = [None] * self.count
        _distributed().all_gather_object(gathered, value, group=self.group)
        return gathered

    def on_first(self, action: Callable[[], T]) -> T:
        """Do something on rank 0 alone; every rank gets the result. Collective.

        Raises:
            CheckpointError: on every rank, when it failed on rank 0.
        """
        told: list[Any] = [None, ""]
        cause: Exception | None = None
        if self.number == 0:
            try:
                told[0] = action()
            except Exception as error:
                cause, told[1] = error, describe_fault(error)
        if self.count > 1:
            _distributed().broadcast_object_list(told, src=0, group=self.group)
        result, fault = told
        if fault:
            raise CheckpointError(fault) from cause
        return result


def _distributed() -> Any:
    """torch.distributed, if anything has imported it: without it there is no process group, and manifests can be read
    without the seconds that torch takes."""
    return sys.modules.get("torch.distributed")


def describe_fault(error: BaseException) -> str:
    """An exception in words; our own need no class name before theirs."""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
