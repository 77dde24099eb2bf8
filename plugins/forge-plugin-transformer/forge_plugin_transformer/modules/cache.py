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

SPARE = 128
"""Positions for which a cache with a window has room besides the window, which is moved when they are used."""


class Cache:
    """Tensors (B, T, …) of up to `length` positions, and the number of each position in its row.

    Memory is allocated with the first positions, in their dtype and shape and on their device: for all positions, or
    with a window for those of the window and `SPARE` more.
    """

    def __init__(self, batch_size: int, length: int, window: int = 0) -> None:
        """Set up an empty cache.

        Args:
            batch_size: rows.
            length: positions of a row at most.
            window: positions that one sees at most, itself included; 0: all.
        """
        self.batch_size, self.length = batch_size, length
        self.window = window if window < length else 0
        self.used = 0
        self._size = min(length, window - 1 + SPARE) if self.window else length
        self._held = 0
        """Positions that are stored, the last ones of those used."""
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
        its outputs, which are not read, stay finite. With a window, T are the positions that one of the new ones sees.

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
        *tensors, seen_at = self._extended([*new, positions])
        self.used = stop
        before = seen_at.shape[1] - positions.shape[1]
        seen_at = seen_at[:, None, None, :]
        mask = (seen_at >= 0) & (seen_at <= positions[:, None, :, None])
        if self.window:  # counted in entries, as in training: the numbers of positions may leave some out
            mask &= torch.ones(mask.shape[2:], dtype=torch.bool, device=mask.device).triu_(before + 1 - self.window)
        mask |= torch.eye(seen_at.shape[-1], dtype=torch.bool, device=mask.device)[before:]
        return tensors, mask

    def _extended(self, new: Sequence[Tensor]) -> list[Tensor]:
        """Stores S positions. Returns the tensors of those in the window of the first, and of these."""
        count, every = new[0].shape[1], (*self._stored, self._positions)
        past = min(self._held, self.window - 1) if self.window else self._held
        if self._held + count <= self._size:
            begin, self._held = self._held - past, self._held + count
            for stored, tensor in zip(every, new, strict=True):
                stored[:, self._held - count : self._held] = tensor
            return [stored[:, begin : self._held] for stored in every]
        # No room behind the last one: the window moves to the front, once in `SPARE` steps of one position.
        first = self._held - past
        whole = [torch.cat([s[:, first : self._held], t.to(s.dtype)], 1) for s, t in zip(every, new, strict=True)]
        self._held = min(past + count, self.window - 1)
        for stored, tensor in zip(every, whole, strict=True):
            stored[:, : self._held] = tensor[:, tensor.shape[1] - self._held :]
        return whole

    def _room(self, like: Tensor) -> Tensor:
        return like.new_zeros(self.batch_size, self._size, *like.shape[2:])
