"""A copy of the state in host memory, to be written while training goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from attrs import frozen
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor


@frozen
class Staged:
    """This rank's part of every tensor, as it was when it was copied."""

    parts: Mapping[str, Tensor]
    wait: Callable[[], object]
    """Returns when the copies have arrived."""


class Staging:
    """Host memory for one copy of the state. It is allocated at the first copy and used again for all later ones."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> Staged:
        """Copy this rank's part of every tensor; what was staged before is overwritten.

        Copies from a device are queued behind the work that it has, and before all that is queued later: neither this
        nor the next step waits for them.
        """
        local = {name: t.to_local() if isinstance(t, DTensor) else t for name, t in tensors.items()}
        self._memory = {name: self._room(name, part) for name, part in local.items()}
        for name, part in local.items():
            self._memory[name].copy_(part, non_blocking=True)
        return Staged(self._memory, _arrival(local))

    def _room(self, name: str, part: Tensor) -> Tensor:
        room = self._memory.get(name)
        if room is not None and (room.shape, room.dtype) == (part.shape, part.dtype):
            return room
        return torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)


class StagedPlanner(DefaultSavePlanner):
    """Plans by the live tensors, whose shapes and placements do not change, and takes the data from the copy."""

    def __init__(self, staged: Staged) -> None:
        super().__init__()
        self._staged = staged

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._staged.parts[index.fqn]


def _arrival(tensors: Mapping[str, Tensor]) -> Callable[[], object]:
    if not any(tensor.is_cuda for tensor in tensors.values()):
        return lambda: None
    event = torch.cuda.Event()
    event.record()
    return event.synchronize
