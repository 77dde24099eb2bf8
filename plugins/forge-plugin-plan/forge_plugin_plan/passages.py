"""What the forward and backward passes of a micro-batch do, as it is recorded to be repeated."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from functools import cached_property
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from forge_plugin_plan.meter import Meter, Transfer
from forge_plugin_plan.storages import Change, Piece, Storages

PATTERN = 1
"""Number of the micro-batch that others repeat."""

Role = tuple[str, int]
"""A storage that the schedule or the loss holds as well: (input, output, gradient of either; its number)."""


class NotAlike(Exception):
    """Micro-batches of a step may differ, so that none may repeat another."""


@define
class Passage:
    """What one forward or backward pass through a section did."""

    changes: Sequence[Change]
    flops: float
    launches: int
    kept: int
    transfers: Counter[Transfer]
    roles: Mapping[Role, Piece]
    ended: frozenset[Role]
    """Those whose storage the pass freed."""
    flags: Mapping[Role, tuple[Any, ...]]
    """State of their pieces after the pass."""

    @cached_property
    def places(self) -> Mapping[int, Role]:
        """The changes of storages that have roles, by their numbers."""
        roles = {id(piece): role for role, piece in self.roles.items()}
        numbered = ((number, roles.get(id(piece))) for number, (piece, _) in enumerate(self.changes))
        return {number: role for number, role in numbered if role is not None}

    def summary(self) -> tuple[Any, ...]:
        """Returns all that counts in a plan; purposes are final only after the step."""
        changes = [(self.places.get(n) or piece.classified(), change) for n, (piece, change) in enumerate(self.changes)]
        return changes, self.flops, self.launches, self.kept, self.transfers, self.ended


@frozen
class Shape:
    """Layout of a tensor in memory."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Shape:
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    def empty(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


@define(eq=False)
class Visit:
    """A micro-batch in a section, or in the loss.

    It holds no tensor, or these would live longer than in a step without it.
    """

    number: int
    inputs: list[weakref.ref[Tensor]]
    trained: list[weakref.ref[Tensor]]
    """Inputs that receive a gradient."""
    known: list[bool]
    """Of each input, whether its storage was followed before the forward pass."""
    roles: dict[Role, Piece] = field(factory=dict)
    outputs: list[Shape] = field(factory=list)
    differentiable: list[bool] = field(factory=list)
    """Of each output, whether the backward pass goes through it."""
    structure: Any = None
    """Lists and tuples that the outputs come in."""
    gradients: dict[int, Shape] = field(factory=dict)
    """Of inputs, by their number."""
    left: list[int] = field(factory=list)
    """Bytes of storages that the backward pass allocated outside of all visits, and that outlived it."""
    forward: Passage | None = None
    backward: Passage | None = None

    def passages(self) -> tuple[Passage, Passage]:
        """Returns what the forward and the backward pass did.

        Raises:
            NotAlike: one of them did not take place.
        """
        if self.forward is None or self.backward is None:
            raise NotAlike("a backward pass that is not seen")
        return self.forward, self.backward

    def assign_inputs(self, storages: Storages) -> None:
        """Give roles to the storages of inputs that are followed."""
        for number, reference in enumerate(self.inputs):
            tensor = reference()
            piece = None if tensor is None else storages.find(tensor)
            if piece is not None:
                self.roles["input", number] = piece

    def assign_gradient(self, number: int, gradient: Tensor, storages: Storages, made: set[int]) -> None:
        """Give a role to the gradient of an input.

        Args:
            number: number of the input among those that are trained.
            gradient: its gradient.
            storages: the storages of the step.
            made: identities of the pieces that the backward pass has allocated.

        Raises:
            NotAlike: its storage has another role already, or the backward pass did not allocate it.
        """
        piece = storages.find(gradient)
        if piece is None or id(piece) not in made or any(piece is other for other in self.roles.values()):
            raise NotAlike("a gradient of an input that is a part of another tensor")
        self.roles["gradient of input", number] = piece
        self.gradients[number] = Shape.of(gradient)


class Recording:
    """What happens from now on until `end`.

    Args:
        meter: counts the step.
        visit: the visit whose backward pass this is; None: this is a forward pass.
        ignored: identities of storages that are no part of the pass, unless they have a role.
    """

    def __init__(self, meter: Meter, visit: Visit | None, ignored: Set[int] = frozenset()) -> None:
        self._meter = meter
        self._start = meter.storages.position()
        self._flops, self._kept, self._transfers = meter.flops, meter.storages.kept, meter.transfers.copy()
        self._launches = meter.launches
        self._before = [(piece, piece.flags()) for piece in meter.storages.alive()]
        forward = () if visit is None or visit.forward is None else visit.forward.changes
        self._of_visit = {id(piece) for piece, _ in forward}
        self._ignored = ignored

    def made(self) -> set[int]:
        """Returns the identities of pieces that were allocated."""
        before = {id(piece) for piece, _ in self._before}
        return {id(piece) for piece, _ in self._meter.storages.since(self._start)} - before

    def end(self, visit: Visit) -> Passage:
        meter, storages = self._meter, self._meter.storages
        # Only the pattern is repeated, so only its marks on other storages could be missing later
        if visit.number == PATTERN:
            self._check_others(visit)
        alive = {id(piece) for piece in storages.alive()}
        ignored = self._ignored - {id(piece) for piece in visit.roles.values()}
        # Not those that were freed before the pass, as an output that nobody holds until the backward pass.
        freed = {id(piece) for piece, _ in storages.since(self._start)} - alive
        return Passage(
            changes=[change for change in storages.since(self._start) if id(change[0]) not in ignored],
            flops=meter.flops - self._flops,
            launches=meter.launches - self._launches,
            kept=storages.kept - self._kept,
            transfers=meter.transfers - self._transfers,
            roles=dict(visit.roles),
            ended=frozenset(role for role, piece in visit.roles.items() if id(piece) in freed),
            flags={role: piece.flags() for role, piece in visit.roles.items()},
        )

    def _check_others(self, visit: Visit) -> None:
        """Check that a pass has marked no storage that only a played pass would mark."""
        own = {id(piece) for piece in visit.roles.values()} | self._of_visit
        freed = {id(piece) for piece, change in self._meter.storages.since(self._start) if change < 0}
        for piece, flags in self._before:
            if id(piece) not in own | freed and piece.flags() != flags:
                raise NotAlike("a storage that is no input is used in another way than before")
