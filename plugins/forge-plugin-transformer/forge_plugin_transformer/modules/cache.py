"""The key-value cache of attention, for generation.

Shapes: B sequences, S new positions, T positions so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch


class Cache:
    """Tensors (B, T, …) of up to `length` positions, and the number of each position in its row.

    Memory is allocated with the first positions, in their dtype and shape and on their device.
    """

    def __init__(self, batch_size: int, length: int) -> None:
        self.batch_size, self.length = batch_size, length
        self.used = 0
        self._stored: Sequence[Tensor] = ()
        self._positions = torch.empty(0)

    @property
    def nbytes(self) -> int:
        """Allocated bytes; 8 a position hold its number."""
        return sum(tensor.nbytes for tensor in (*self._stored, self._positions))

    def positions(self, x: Tensor, batch: Batch) -> Tensor:
        """Returns the numbers (B, S) of new positions, x being (B, S, …): by default those after the ones so far."""
        if "positions" in batch:
            return batch["positions"]
        return torch.arange(self.used, self.used + x.shape[1], device=x.device).expand(len(x), -1)

    def append(self, new: Sequence[Tensor], positions: Tensor) -> tuple[list[Tensor], Tensor]:
        """Append S positions. Returns the tensors (B, T, …) of all positions so far, and the mask (B, 1, S, T).

        A position sees every one that is not later, and no padding (negative position); padding sees itself, so that
        its outputs, which are not read, stay finite.

        Raises:
            ValueError: the cache is full.
        """
        start, stop = self.used, self.used + positions.shape[1]
        if stop > self.length:
            usage = f"{start} are used, {positions.shape[1]} more do not fit"
            raise ValueError(f"the cache holds {self.length} positions; {usage}")
        if not start:
            self._stored = [self._room(tensor) for tensor in new]
            self._positions = self._room(positions)
        for stored, tensor in zip((*self._stored, self._positions), (*new, positions), strict=True):
            stored[:, start:stop] = tensor
        self.used = stop
        seen_at = self._positions[:, None, None, :stop]
        mask = (seen_at >= 0) & (seen_at <= positions[:, None, :, None])
        mask |= torch.eye(stop, dtype=torch.bool, device=mask.device)[start:]
        return [stored[:, :stop] for stored in self._stored], mask

    def _room(self, like: Tensor) -> Tensor:
        return like.new_zeros(self.batch_size, self.length, *like.shape[2:])
