"""Plays a few micro-batches of a pipeline's step, and repeats for all others what these did.

The micro-batches of a step pass through a section of the model in the same way: the same operations in the same order,
which allocate and free as much, compute as much and send as much. So of each section only four of them are played. The
first and the last one may differ from all others: the first allocates gradients and gathers weights. The second is the
pattern of all that follow, and the last but one is compared to it. In schedules such as 1F1B, the pattern runs as the
pipeline fills, the last but one while it empties. What the pattern did is repeated at the same places of the
schedule, which itself runs in full, with the loss of every micro-batch and all that is sent between pipeline ranks.

The figures are exactly those of a step played in full, provided that the micro-batches between the two would do what
both do. `NotAlike` is raised where anything shows that they may not; fewer micro-batches are then played, each of them,
and what the last of these adds is added for all further ones.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any
from unittest.mock import patch

import torch
from attrs import define, field, frozen
from torch import Tensor, nn

from forge_kit.torch_internals import tree_leaves
from forge_plugin_plan.meter import Meter, Transfer
from forge_plugin_plan.storages import Change, Piece
from forge_plugin_plan.torch_internals import hook_gradient_first

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
        return changes, self.flops, self.kept, self.transfers, self.ended


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
    """A micro-batch in a section. It holds no tensor, or these would live longer than in a step without it."""

    number: int
    inputs: list[weakref.ref[Tensor]]
    trained: list[weakref.ref[Tensor]]
    """Inputs that receive a gradient."""
    known: list[bool]
    """Of each input, whether its storage was followed before the forward pass."""
    roles: dict[Role, Piece] = field(factory=dict)
    outputs: list[Shape] = field(factory=list)
    single: bool = True
    """Whether the output is one tensor and no tuple."""
    gradients: dict[int, Shape] = field(factory=dict)
    """Of inputs, by their number."""
    left: list[int] = field(factory=list)
    """Bytes of storages that the backward pass allocated before it reached the model, and that outlived it."""
    forward: Passage | None = None
    backward: Passage | None = None


class Repetition:
    """Watches, or repeats, all passes of one step through a model that is called section by section.

    Args:
        meter: counts the step.
        model: the model.
        count: micro-batches of the step.
        report: receives the micro-batch that comes next.
    """

    def __init__(self, meter: Meter, model: nn.Module, count: int, report: Callable[[str], object]) -> None:
        self._report = report
        self._meter, self._model, self._count = meter, model, count
        self._storages = meter.storages
        self._played = {0, PATTERN, count - 2, count - 1}
        self._calls: Counter[Hashable] = Counter()
        self._visits: dict[tuple[Hashable, int], Visit] = {}
        self._depth = self._backward_position = 0
        self._open: _Recording | None = None
        self._open_visit: Visit | None = None
        self._repeating: Visit | None = None
        """The pattern that the running backward pass repeats."""
        self._outside: list[Piece] = []
        """Storages that the running backward pass allocated before it reached the model."""
        with meter.paused():
            self._anchor = torch.zeros((), requires_grad=True)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within this context, calls of the model are watched or repeated.

        Raises:
            NotAlike: micro-batches may differ.
        """
        original = type(self._model)
        repetition = self

        def call(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return repetition._call(lambda: original.__call__(model, *args, **kwargs), (args, kwargs))

        # A class of its own, since Python looks up `__call__` there, and all hooks of the model belong to the call.
        self._model.__class__ = type(original.__name__, (original,), {"__call__": call})
        try:
            with patch.object(torch.autograd, "backward", self._around_backward(torch.autograd.backward)):
                yield
        finally:
            self._model.__class__ = original
        self._compare()

    # --- calls -----------------------------------------------------------------------------------------------------

    def _call(self, play: Callable[[], Any], arguments: Any) -> Any:
        if not torch.is_grad_enabled() or self._count <= len(self._played):
            return play()
        leaves = tree_leaves(arguments)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        key = tuple((Shape.of(leaf), leaf.requires_grad) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        number = self._calls[key]
        self._calls[key] += 1
        self._report(f"micro-batch {number + 1} of {self._count}")
        trained = [tensor for tensor in tensors if tensor.requires_grad]
        known = [self._storages.find(tensor) is not None for tensor in tensors]
        visit = Visit(number, [*map(weakref.ref, tensors)], [*map(weakref.ref, trained)], known)
        if number in self._played:
            self._visits[key, number] = visit
            return self._play(visit, play)
        pattern = self._visits[key, PATTERN]
        outputs = _Repeated.apply(self, visit, pattern, tensors, self._anchor, *trained)
        return outputs[0] if pattern.single else outputs

    def _play(self, visit: Visit, play: Callable[[], Any]) -> Any:
        recording = self._start()
        self._assign_inputs(visit)
        result = play()
        self._assign_inputs(visit)  # again: the pass may be the first operation on some
        outputs = [result] if isinstance(result, Tensor) else result
        visit.single = outputs is not result
        if not isinstance(outputs, list | tuple):
            raise NotAlike("an output that is no tensor")
        made = recording.made()
        for number, output in enumerate(outputs):
            if not isinstance(output, Tensor) or not output.requires_grad:
                raise NotAlike("an output that takes no part in the backward pass")
            piece = self._storages.find(output)
            if piece is None or id(piece) not in made or piece in visit.roles.values():
                raise NotAlike("an output that is a part of another tensor")
            visit.roles["output", number] = piece
            visit.outputs.append(Shape.of(output))
            hook_gradient_first(output, self._begin_backward(visit, number))
        visit.forward = recording.end(visit)
        return result

    def _assign_inputs(self, visit: Visit) -> None:
        for number, reference in enumerate(visit.inputs):
            tensor = reference()
            piece = None if tensor is None else self._storages.find(tensor)
            if piece is not None:
                visit.roles["input", number] = piece

    def _repeat_forward(self, visit: Visit, pattern: Visit) -> tuple[Tensor, ...]:
        assert pattern.forward is not None
        if visit.known != pattern.known:
            raise NotAlike("inputs that are followed only in some micro-batches")
        for number, reference in enumerate(visit.inputs):
            tensor = reference()
            if ("input", number) in pattern.roles and tensor is not None:
                visit.roles["input", number] = self._storages.find(tensor) or self._storages.adopt(tensor)
        made = [self._make(visit, ("output", n), shape, pattern) for n, shape in enumerate(pattern.outputs)]
        self._repeat(visit, pattern.forward)
        return tuple(made)

    def _make(self, visit: Visit, role: Role, shape: Shape, pattern: Visit) -> Tensor:
        with self._meter.paused():
            tensor = shape.empty()
        visit.roles[role] = self._storages.adopt(tensor)
        if visit.roles[role].bytes != pattern.roles[role].bytes:
            raise NotAlike("a storage that is larger than its tensor")
        return tensor

    def _repeat(self, visit: Visit, passage: Passage) -> None:
        changes = list(passage.changes)
        for number, role in passage.places.items():
            changes[number] = visit.roles[role], changes[number][1]
        self._storages.repeat(changes, passage.kept)
        for role, flags in passage.flags.items():
            visit.roles[role].set_flags(flags)
        for role in passage.ended:
            self._storages.forget(visit.roles[role])
        self._meter.flops += passage.flops
        self._meter.transfers.update(passage.transfers)

    # --- backward passes -------------------------------------------------------------------------------------------

    def _around_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            if self._depth == 0:
                self._backward_position = self._storages.position()
            self._depth += 1
            try:
                result = original(*args, **kwargs)
            finally:
                self._depth -= 1
            if self._depth == 0:
                self._end_backward()
            return result

        return backward

    def _begin_backward(self, visit: Visit, number: int) -> Callable[[Tensor], None]:
        def begin(gradient: Tensor) -> None:
            if self._depth == 0:
                raise NotAlike("a backward pass in parts")
            if self._open is None:
                if not all(self._storages.has(piece) for (kind, _), piece in visit.roles.items() if kind == "input"):
                    raise NotAlike("an input that is freed before the backward pass")
                self._open, self._open_visit = self._start(visit), visit
                # Such as the gradient of the loss: real in every micro-batch, and freed when the backward pass ends.
                self._outside = [piece for piece, _ in self._storages.since(self._backward_position)]
                self._open.ignored = set(map(id, self._outside))
            if self._open_visit is not visit:
                raise NotAlike("a backward pass through several sections")
            piece = self._storages.find(gradient)
            if piece is not None:
                visit.roles.setdefault(("gradient of output", number), piece)

        return begin

    def _end_backward(self) -> None:
        alive = set(map(id, self._storages.alive()))
        left = sorted(
            piece.bytes for piece in {id(piece): piece for piece in self._outside}.values() if id(piece) in alive
        )
        pattern, self._repeating = self._repeating, None
        # The gradient of a head, say, which fsdp takes over at the end of the pass, and here nobody does.
        if pattern is not None and left != pattern.left:
            raise NotAlike("a backward pass of the loss that leaves something in memory")
        visit, recording = self._open_visit, self._open
        if visit is None or recording is None:
            return
        visit.left = left
        self._open = self._open_visit = None
        made = recording.made()
        for number, reference in enumerate(visit.trained):
            tensor = reference()
            if tensor is None or not tensor.is_leaf:
                raise NotAlike("an input that is no leaf")
            if tensor.grad is None:
                continue
            piece = self._storages.find(tensor.grad)
            if piece is None or id(piece) not in made or piece in visit.roles.values():
                raise NotAlike("a gradient of an input that is a part of another tensor")
            visit.roles["gradient of input", number] = piece
            visit.gradients[number] = Shape.of(tensor.grad)
        visit.backward = recording.end(visit)

    def _repeat_backward(self, visit: Visit, pattern: Visit, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        if pattern.backward is None:
            raise NotAlike("a backward pass that precedes that of the pattern")
        self._repeating = pattern
        self._outside = [piece for piece, _ in self._storages.since(self._backward_position)]
        for number, gradient in enumerate(gradients):
            piece = None if gradient is None else self._storages.find(gradient)
            if (piece is None) != (("gradient of output", number) not in pattern.roles):
                raise NotAlike("other gradients of outputs")
            if piece is not None:
                visit.roles["gradient of output", number] = piece
        made: list[Tensor | None] = [None] * len(visit.trained)
        for number, shape in pattern.gradients.items():
            made[number] = self._make(visit, ("gradient of input", number), shape, pattern)
        self._repeat(visit, pattern.backward)
        return made

    # --- comparisons -----------------------------------------------------------------------------------------------

    def _start(self, visit: Visit | None = None) -> _Recording:
        return _Recording(self._meter, visit)

    def _compare(self) -> None:
        if any(times != self._count for times in self._calls.values()):
            raise NotAlike("a section that is not called once for each micro-batch")
        for (key, number), pattern in self._visits.items():
            if number != PATTERN:
                continue
            other = self._visits[key, self._count - 2]
            passages = (pattern.forward, pattern.backward, other.forward, other.backward)
            if any(passage is None for passage in passages):
                raise NotAlike("a backward pass that is not seen")
            first, second, third, fourth = (passage.summary() for passage in passages if passage is not None)
            if (first, second) != (third, fourth):
                raise NotAlike("micro-batches that differ")
            self._balance(pattern)

    def _balance(self, pattern: Visit) -> None:
        """Check that a micro-batch leaves nothing behind: of what repeated ones leave, nobody would see the end."""
        assert pattern.forward is not None
        assert pattern.backward is not None
        left: Counter[Any] = Counter()
        for passage in (pattern.forward, pattern.backward):
            for number, (piece, change) in enumerate(passage.changes):
                if number not in passage.places:
                    left[piece.classified()] += change
        if any(left.values()):
            raise NotAlike("micro-batches that leave something in memory")


class _Recording:
    """What happens from now on until `end`."""

    def __init__(self, meter: Meter, visit: Visit | None) -> None:
        self._meter = meter
        self._start = meter.storages.position()
        self._flops, self._kept, self._transfers = meter.flops, meter.storages.kept, meter.transfers.copy()
        self._before = [(piece, piece.flags()) for piece in meter.storages.alive()]
        forward = () if visit is None or visit.forward is None else visit.forward.changes
        self._of_visit = {id(piece) for piece, _ in forward}
        self.ignored: set[int] = set()
        """Storages that are no part of the pass, unless they have a role."""

    def made(self) -> set[int]:
        """Returns the identities of pieces that were allocated."""
        before = {id(piece) for piece, _ in self._before}
        return {id(piece) for piece, _ in self._meter.storages.since(self._start)} - before

    def end(self, visit: Visit) -> Passage:
        meter, storages = self._meter, self._meter.storages
        if visit.number == PATTERN:
            self._check_others(visit)
        alive = {id(piece) for piece in storages.alive()}
        ignored = self.ignored - {id(piece) for piece in visit.roles.values()}
        return Passage(
            changes=[change for change in storages.since(self._start) if id(change[0]) not in ignored],
            flops=meter.flops - self._flops,
            kept=storages.kept - self._kept,
            transfers=meter.transfers - self._transfers,
            roles=dict(visit.roles),
            ended=frozenset(role for role, piece in visit.roles.items() if id(piece) not in alive),
            flags={role: piece.flags() for role, piece in visit.roles.items()},
        )

    def _check_others(self, visit: Visit) -> None:
        """Check that a pass has marked no storage that only a played pass would mark."""
        own = {id(piece) for piece in visit.roles.values()} | self._of_visit
        freed = {id(piece) for piece, change in self._meter.storages.since(self._start) if change < 0}
        for piece, flags in self._before:
            if id(piece) not in own | freed and piece.flags() != flags:
                raise NotAlike("a storage that is no input is used in another way than before")


class _Repeated(torch.autograd.Function):
    """A forward pass through a section, and its backward pass, repeated."""

    @staticmethod
    def forward(
        ctx: Any,
        repetition: Repetition,
        visit: Visit,
        pattern: Visit,
        inputs: Sequence[Tensor],
        _anchor: Tensor,
        *_trained: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.repetition, ctx.visit, ctx.pattern = repetition, visit, pattern
        ctx.inputs = inputs  # as the pattern does: all inputs exist until the backward pass
        return repetition._repeat_forward(visit, pattern)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        made = ctx.repetition._repeat_backward(ctx.visit, ctx.pattern, gradients)
        ctx.inputs = None
        return (None, None, None, None, None, *made)
