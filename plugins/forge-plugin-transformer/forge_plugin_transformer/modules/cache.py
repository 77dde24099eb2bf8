"""The key-value cache of attention, for generation.

Shapes: B sequences, S new positions, T positions so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from forge_kit.nn.direct_calls import DirectCalls
from forge_kit.nn.generation import ForgetsPositions

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch

SPARE = 128
"""Positions for which a cache with a window has extra room; once they are used up, the window is moved."""
NO_POSITION = -1
"""Number of padding."""


class LayerCaches(dict[str, Any]):
    """The caches of a model's parts, by name; see `forge_kit.nn.generation.JoinsRows`."""

    def __init__(self, *args: Any, direct_calls: DirectCalls | None = None) -> None:
        super().__init__(*args)
        self._direct_calls = direct_calls or DirectCalls()

    def direct(self, layers: dict[str, nn.Module]) -> dict[str, nn.Module]:
        """Returns what computes a single position as these layers do, with fewer calls."""
        return self._direct_calls(layers)

    @property
    def forgets(self) -> str:
        """Names the first part whose cache cannot; see `forge_kit.nn.generation.ForgetsPositions`."""
        for name, cache in self.items():
            if not isinstance(cache, ForgetsPositions):
                return f"the cache of layer {name}, {type(cache).__name__}, keeps no earlier state"
            if cache.forgets:
                return f"in layer {name} {cache.forgets}"
        return ""

    def forget(self, count: int) -> None:
        """Drops the newest positions of every part."""
        for cache in self.values():
            cache.forget(count)

    @property
    def joinable(self) -> bool:
        """Whether the cache of every part can; a part of another distribution may have any cache."""
        # Not by `isinstance`, which looks up the members of a protocol each time, and takes as long as a layer
        return all(hasattr(cache, "joined") and cache.joinable for cache in self.values())

    def joined(self, parts: Sequence[tuple[LayerCaches, Tensor]], columns: int, length: int) -> LayerCaches:
        """Joins part by part. The direct copies of layers are kept: they do not depend on rows."""
        joined = [
            (name, cache.joined([(caches[name], rows) for caches, rows in parts], columns, length))
            for name, cache in self.items()
        ]
        return LayerCaches(joined, direct_calls=self._direct_calls)


class NoCache:
    """The cache of a layer without attention, which keeps nothing of earlier positions."""

    nbytes = 0
    forgets = ""
    joinable = True

    def forget(self, count: int) -> None:
        """Does nothing."""

    def joined(self, parts: Sequence[tuple[NoCache, Tensor]], columns: int, length: int) -> NoCache:
        """Returns another one."""
        return NoCache()


class Cache:
    """Tensors (B, T, …) of up to `length` positions, and the number of each position in its row.

    Memory is allocated with the first positions, in their dtype and shape and on their device: for all positions, or
    with a window for the window's positions and `SPARE` more.
    """

    whole_mask: Tensor | None = None
    """Stands for a mask (B, 1, 1, T) that hides nothing, in a class whose attention recognises it."""

    def __init__(self, batch_size: int, length: int, window: int = 0) -> None:
        """Set up an empty cache.

        Args:
            batch_size: rows.
            length: positions of a row at most.
            window: positions that one sees at most, itself included; 0: all.
        """
        self.batch_size, self.length = batch_size, length
        self._asked_window = window
        # A window that no row can exceed hides nothing: without it masks cost less, and nothing is ever moved
        self.window = window if window < length else 0
        self.used = 0
        # A new position sees `window` - 1 earlier ones
        self._size = min(length, window - 1 + SPARE) if self.window else length
        self._held = 0
        """Positions that are stored, the last ones of those used."""
        self._stored: Sequence[Tensor] = ()
        self._positions = torch.empty(0)
        self._mask_key = f"mask of {type(self).__name__} within {self.window}"
        self._newest: list[int] | None = None
        """Greatest number of each row so far, as the host has it; None: to be looked up. Empty: there is padding."""
        self._asked: tuple[Tensor, list[int]] | None = None
        """The positions of `sees_all`, which are appended next, and their numbers."""

    @property
    def nbytes(self) -> int:
        """Allocated bytes; 8 a position hold its number."""
        return sum(tensor.nbytes for tensor in (*self._stored, self._positions))

    def positions(self, x: Tensor, batch: Batch) -> Tensor:
        """Returns the numbers (B, S) of new positions, x being (B, S, …): by default those after the ones so far."""
        if "positions" in batch:
            return batch["positions"]
        return torch.arange(self.used, self.used + x.shape[1], device=x.device).expand(len(x), -1)

    def with_mask(self, batch: Batch) -> Batch:
        """Returns the batch with the mask of its next positions, which layers with equal windows share."""
        # Those layers have seen the same positions: a model feeds all of them at once.
        key, positions = self._mask_key, batch.get("positions")
        if key in batch or positions is None:
            return batch
        if self.whole_mask is not None and self.sees_all(positions):
            return {**batch, key: self.whole_mask}
        return {**batch, key: self.mask(positions)}

    def shared_mask(self, batch: Batch) -> Tensor | None:
        """Returns the mask of `with_mask`, if the batch has it."""
        return batch.get(self._mask_key)

    def sees_all(self, positions: Tensor) -> bool:
        """Whether the next positions (B, S) are known to see all T: one of each row, and no padding before it.

        Known on CPUs only: elsewhere the host would wait for the device.
        """
        self._asked = None
        if positions.shape[1] != 1 or positions.device.type != "cpu":
            return False
        if self._newest is None and self._past():
            seen = self._positions[:, self._held - self._past() : self._held]
            newest: list[int] = seen.amax(1).tolist()
            self._newest = newest if int(seen.amin()) >= 0 else []
        numbers: list[int] = positions.flatten().tolist()
        # With nothing stored yet, every number is later than none
        earlier = [NO_POSITION] * len(numbers) if self._newest is None else self._newest
        if len(earlier) != len(numbers) or any(new <= old for new, old in zip(numbers, earlier, strict=True)):
            return False
        self._asked = positions, numbers
        return True

    def mask(self, positions: Tensor) -> Tensor:
        """Returns which of T positions the next ones (B, S) see: (B, 1, S, T).

        A position sees every one that is not later, and no padding (negative position); padding sees itself, so that
        its outputs, which are not read, stay finite. With a window, T are the positions that one of the new ones sees.
        """
        before = self._past()
        earlier = self._positions[:, self._held - before : self._held] if before else positions[:, :0]
        seen_at = torch.cat([earlier, positions], 1)[:, None, None, :]
        mask = (seen_at >= 0) & (seen_at <= positions[:, None, :, None])
        # Entries by number, (T,) and (S, 1): made from a T x T matrix, each token would cost the square of the text.
        entries = torch.arange(seen_at.shape[-1], device=mask.device)
        queries = entries[before:, None]
        if self.window:  # counted in entries, as in training: the numbers of positions may leave some out
            mask &= entries > queries - self.window
        mask |= entries == queries
        return mask

    def append(
        self, new: Sequence[Tensor], positions: Tensor, mask: Tensor | None = None
    ) -> tuple[list[Tensor], Tensor]:
        """Append S positions. Returns the tensors (B, T, …) of all positions so far, and the mask (B, 1, S, T).

        Args:
            new: tensors (B, S, …).
            positions: their numbers (B, S).
            mask: the mask, if it is known; see `mask`.

        Raises:
            ValueError: the cache is full.
        """
        start, stop = self.used, self.used + positions.shape[1]
        if stop > self.length:
            usage = f"{start} are used, {positions.shape[1]} more do not fit"
            raise ValueError(f"the cache holds {self.length} positions; {usage}")
        if mask is None:
            mask = self.mask(positions)
        if not self._stored:
            self._stored = [self._room(tensor) for tensor in new]
            self._positions = self._room(positions)
        tensors = self._extended([*new, positions])
        self.used = stop
        # Known without another look only if `sees_all` has read these very positions
        if self._newest != []:
            self._newest = self._asked[1] if self._asked is not None and self._asked[0] is positions else None
        return tensors, mask

    @property
    def forgets(self) -> str:
        """See `forge_kit.nn.generation.ForgetsPositions`. A window that has moved has lost what came before it."""
        return f"a window of {self.window} positions is shorter than the text" if self.window else ""

    def forget(self, count: int) -> None:
        """Drops the newest `count` positions; later ones overwrite them."""
        self.used -= count
        self._held -= count
        self._newest = self._asked = None

    def _past(self) -> int:
        """Returns how many of the stored positions the next one sees."""
        return min(self._held, self.window - 1) if self.window else self._held

    def _extended(self, new: Sequence[Tensor]) -> list[Tensor]:
        """Stores S positions. Returns `new` of those in the window of the first and of these, without their numbers."""
        count, every, past = new[0].shape[1], (*self._stored, self._positions), self._past()
        if self._held + count <= self._size:
            begin, self._held = self._held - past, self._held + count
            for stored, tensor in zip(every, new, strict=True):
                stored[:, self._held - count : self._held] = tensor
            return [stored[:, begin : self._held] for stored in self._stored]
        # No room behind the last one: the window moves to the front, once in `SPARE` steps of one position.
        first = self._held - past
        whole = [torch.cat([s[:, first : self._held], t.to(s.dtype)], 1) for s, t in zip(every, new, strict=True)]
        # A later position sees no more than these
        self._held = min(past + count, self.window - 1)
        for stored, tensor in zip(every, whole, strict=True):
            stored[:, : self._held] = tensor[:, tensor.shape[1] - self._held :]
        return whole[:-1]

    def _room(self, like: Tensor) -> Tensor:
        if like.ndim < 4:
            # Zeros and not `new_empty`: hidden entries have weight 0, and 0 times a NaN in unwritten memory is NaN
            return like.new_zeros(self.batch_size, self._size, *like.shape[2:])
        # All positions of a head side by side in memory: a query of one position then reads them in half the time.
        heads, width = like.shape[2:]
        return like.new_zeros(self.batch_size, heads, self._size, width).transpose(1, 2)

    # --- rows of several caches --------------------------------------------------------------------------------------

    @property
    def joinable(self) -> bool:
        """True while the cache is empty, and then if its tensors are stored in this object."""
        # A class derived from this one may keep its tensors elsewhere.
        return self.used == 0 or len(self._stored) > 0

    def emptied(self, batch_size: int, length: int) -> Self:
        """Returns an empty cache of this kind."""
        # The window of the constructor, which matters again where the new cache is longer than this one
        return type(self)(batch_size, length, self._asked_window)

    def joined(self, parts: Sequence[tuple[Self, Tensor]], columns: int, length: int) -> Self:
        """Returns a cache of rows of several; see `forge_kit.nn.generation.JoinsRows`."""
        new = self.emptied(sum(len(rows) for _, rows in parts), length)
        new.used = columns
        # Rows are flush right; columns that a row does not have are padding, which no position sees
        new._held = min(max(cache._held for cache, _ in parts), columns, *([new.window - 1] if new.window else []))
        every = [new._room(tensor) for tensor in (*self._stored, self._positions)]
        every[-1].fill_(NO_POSITION)
        start = 0
        for cache, rows in parts:
            count, stop = min(cache._held, new._held), start + len(rows)
            for tensor, stored in zip(every, (*cache._stored, cache._positions), strict=True):
                newest = stored[:, cache._held - count : cache._held]
                tensor[start:stop, new._held - count : new._held] = newest.index_select(0, rows)
            start = stop
        *new._stored, new._positions = every
        return new
