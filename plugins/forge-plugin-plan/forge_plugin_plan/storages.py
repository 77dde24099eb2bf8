"""Lifetime and purpose of every storage in a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Any
from unittest.mock import patch

import torch
from attrs import define, field, frozen
from torch import Tensor

from forge_core.parallel.mesh import local_part
from forge_plugin_plan.torch_internals import backward_pass, identity_of


class Purpose(StrEnum):
    """Purpose of memory. The first one that fits counts."""

    WEIGHTS = "weights"
    BESIDE = "models beside it"
    BUFFERS = "buffers"
    OPTIMIZER = "optimizer state"
    GRADIENTS = "gradients"
    COPIES = "gathered and cast weights"
    LOGITS = "logits"
    ACTIVATIONS = "activations"
    COMMUNICATION = "communication buffers"
    OTHER = "temporary"


PERSISTENT = (Purpose.WEIGHTS, Purpose.BESIDE, Purpose.BUFFERS, Purpose.OPTIMIZER)
"""Purposes of memory that exists throughout a step."""


@define(eq=False)
class Piece:
    """One storage."""

    bytes: int
    purpose: Purpose | None = None
    """Purpose known at allocation."""
    made_in_backward: int = -1
    """Number of the backward pass that allocated it; -1: none did."""
    copy_of_weights: bool = False
    kept: bool = False
    """Whether a forward pass kept it for the backward: as a saved tensor, or as an input of recomputation."""
    sent: bool = False
    """Whether a collective read or wrote it."""
    outlived: bool = False
    """Whether it outlived the backward pass that allocated it."""

    def flags(self) -> tuple[Any, ...]:
        """Returns all that operations may change."""
        return self.bytes, self.purpose, self.copy_of_weights, self.kept, self.sent, self.outlived

    def set_flags(self, flags: tuple[Any, ...]) -> None:
        """Set what `flags` of another piece returned."""
        self.bytes, self.purpose, self.copy_of_weights, self.kept, self.sent, self.outlived = flags

    def classified(self) -> Purpose:
        """Returns the final purpose, after the step."""
        if self.purpose in (*PERSISTENT, Purpose.GRADIENTS):
            return self.purpose
        if self.copy_of_weights:
            return Purpose.COPIES
        if self.purpose is not None:
            return self.purpose
        if self.kept:
            return Purpose.ACTIVATIONS
        if self.sent:
            return Purpose.COMMUNICATION
        return Purpose.GRADIENTS if self.outlived else Purpose.OTHER


Change = tuple[Piece, int]
"""A storage, and the bytes by which it has grown: negative when it is freed."""


@frozen
class Memory:
    """Bytes of a rank over a step, by purpose."""

    most: Mapping[Purpose, int]
    """Maximum over the step; not all purposes reach it at the same time."""
    at_peak: Mapping[Purpose, int]
    """Bytes per purpose at the moment of peak total memory."""

    @property
    def peak(self) -> int:
        return sum(self.at_peak.values())

    def beside(self, other: Memory) -> Memory:
        """Returns the larger of two, which are not needed at the same time."""
        most = {purpose: max(self.most[purpose], other.most[purpose]) for purpose in Purpose}
        return Memory(most, self.at_peak if self.peak >= other.peak else other.at_peak)

    def continued(self, fewer: Memory, further: float) -> Memory:
        """Returns this memory plus `further` times its excess over `fewer`."""
        # There is an excess only in a pipeline that keeps all micro-batches until their backward passes.
        most, at_peak = dict(self.most), dict(self.at_peak)
        for purpose in Purpose:
            most[purpose] += round(further * max(0, self.most[purpose] - fewer.most[purpose]))
            at_peak[purpose] += round(further * max(0, self.at_peak[purpose] - fewer.at_peak[purpose]))
        return Memory(most, at_peak)


@define(eq=False)
class Storages:
    """Follows storages from the operation that allocates them until they are freed."""

    _pieces: dict[int, Piece] = field(factory=dict)
    _guards: dict[int, Any] = field(factory=dict)
    _log: list[Change] = field(factory=list)
    """Changes of bytes, in order."""
    kept: int = 0
    """Bytes that forward passes kept for the backward, each storage once."""

    def find(self, tensor: Tensor) -> Piece | None:
        return self._pieces.get(identity_of(tensor.untyped_storage()))

    def piece(self, tensor: Tensor) -> tuple[Piece, bool]:
        """Returns the storage of a tensor, and whether it was unknown until now."""
        storage = tensor.untyped_storage()
        key = identity_of(storage)
        if key in self._pieces:
            return self._pieces[key], False
        piece = self.adopt(tensor)
        self._log.append((piece, piece.bytes))
        return piece, True

    def adopt(self, tensor: Tensor) -> Piece:
        """Follow the storage of a new tensor, whose allocation is a change that `repeat` adds."""
        storage = tensor.untyped_storage()
        return self._follow(storage, 0 if tensor.device.type == "meta" else storage.nbytes())

    def assign_storages(self, storages: Iterable[torch.UntypedStorage], purpose: Purpose) -> None:
        """Set the purpose of storages that have memory, and that exist before the step if they are not known yet."""
        for storage in storages:
            piece = self._pieces.get(identity_of(storage))
            if piece is None:
                piece = self._follow(storage, storage.nbytes())
                self._log.append((piece, piece.bytes))
            piece.purpose = purpose

    def _follow(self, storage: torch.UntypedStorage, size: int) -> Piece:
        key = identity_of(storage)
        piece = self._pieces[key] = Piece(size, made_in_backward=backward_pass())
        # No operation shows that a storage is freed, so a weak reference reports it
        self._guards[key] = weakref.ref(storage, lambda _: self._end(key))
        return piece

    def assign(self, tensors: Iterable[Tensor], purpose: Purpose) -> int:
        """Set the purpose of tensors; returns their bytes, each storage once."""
        pieces = {id(piece): piece for piece in (self.piece(local_part(tensor))[0] for tensor in tensors)}
        for piece in pieces.values():
            piece.purpose = purpose
        return sum(piece.bytes for piece in pieces.values())

    def pass_through(self, size: int) -> None:
        """Note memory that an operation allocates and frees before it returns."""
        piece = Piece(size, Purpose.OTHER)
        self._log += [(piece, size), (piece, -size)]

    def keep(self, piece: Piece) -> None:
        """Note that a forward pass keeps a storage for the backward."""
        if not piece.kept:
            piece.kept = True
            self.kept += piece.bytes

    # --- changes that are repeated -----------------------------------------------------------------------------------

    def position(self) -> int:
        """Returns the number of changes until now."""
        return len(self._log)

    def since(self, position: int) -> list[Change]:
        """Returns the changes after a position."""
        return self._log[position:]

    def alive(self) -> list[Piece]:
        """Returns the storages that exist."""
        return [*self._pieces.values()]

    def has(self, piece: Piece) -> bool:
        """Whether a storage exists."""
        return any(piece is other for other in self._pieces.values())

    def repeat(self, changes: Iterable[Change], kept: int) -> None:
        """Add changes, and bytes that forward passes kept, as if operations had made them."""
        self._log.extend(changes)
        self.kept += kept

    def forget(self, piece: Piece) -> None:
        """Follow a storage no longer, whose end is a change that was added."""
        [key] = [key for key, other in self._pieces.items() if other is piece]
        del self._pieces[key], self._guards[key]

    # --- ends and sizes ----------------------------------------------------------------------------------------------

    def _end(self, key: int) -> None:
        piece = self._pieces.pop(key)
        del self._guards[key]
        self._log.append((piece, -piece.bytes))
        now = backward_pass()
        # An input of recomputation is no saved tensor: it is known by the backward pass that frees it.
        if piece.made_in_backward == -1 and now != -1:
            self.keep(piece)
        piece.outlived |= piece.made_in_backward not in (-1, now)

    @contextmanager
    def resizing(self) -> Iterator[None]:
        """Within this context, storages that change their size are followed too, by which fsdp frees and allocates."""
        resize: Callable[..., Any] = torch.UntypedStorage.resize_

        def followed(storage: torch.UntypedStorage, size: int) -> Any:
            piece = self._pieces.get(identity_of(storage))
            result = resize(storage, size)
            if piece is not None:
                self._log.append((piece, storage.nbytes() - piece.bytes))
                piece.bytes = storage.nbytes()
            return result

        with patch.object(torch.UntypedStorage, "resize_", followed):
            yield

    def memory(self) -> Memory:
        """Returns the memory over the step, in which persistent storages exist from the beginning."""
        alive = {id(piece) for piece in self._pieces.values()}
        pieces = {id(piece): piece for piece, _ in self._log}
        purposes = {key: piece.classified() for key, piece in pieces.items()}
        # A persistent storage that was freed in the step is followed by the log, like all others
        kept = {key for key, purpose in purposes.items() if purpose in PERSISTENT and key in alive}
        now = dict.fromkeys(Purpose, 0)
        for piece in self._pieces.values():
            if id(piece) in kept:
                now[purposes[id(piece)]] += piece.bytes
        most, at_peak, total, peak = dict(now), dict(now), sum(now.values()), sum(now.values())
        for piece, change in self._log:
            if id(piece) in kept:
                continue
            purpose = purposes[id(piece)]
            now[purpose] += change
            total += change
            most[purpose] = max(most[purpose], now[purpose])
            if total > peak:
                peak, at_peak = total, dict(now)
        return Memory(most, at_peak)
