"""Plays a few micro-batches of a pipeline's step, and repeats for all others what these did.

The micro-batches of a step pass through a section of the model, and through the loss, in the same way: the same
operations in the same order, which allocate and free as much, compute as much and send as much. So of each section, and
of the loss, only four of them are played. The first and the last one may differ from all others: the first allocates
gradients and gathers weights. The second is the pattern of all that follow, and the last but one is compared to it. In
schedules such as 1F1B, the pattern runs as the pipeline fills, the last but one while it empties. What the pattern did
is repeated at the same places of the schedule, which itself runs in full, with all that is sent between pipeline ranks.

The figures are identical to the figures of a step played in full, provided that the micro-batches between the two would
do the same as both. `NotAlike` is raised if anything shows that they may not; fewer micro-batches are then played, each
of them in full, and what the last of these adds is added for all further ones.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from forge_kit.torch_internals import tree_leaves
from forge_plugin_plan.meter import Meter, MeteredLoss
from forge_plugin_plan.passages import PATTERN, NotAlike, Passage, Recording, Role, Shape, Visit
from forge_plugin_plan.storages import Piece
from forge_plugin_plan.torch_internals import hook_gradient_first, tree_flatten, tree_unflatten

MODEL = "model"
LOSS = "loss"


class Repetition:
    """Watches, or repeats, all passes of one step through the loss and a model that is called section by section.

    Args:
        meter: counts the step.
        model: the model.
        loss: the loss of the step.
        count: micro-batches of the step.
        report: receives the micro-batch that comes next.
    """

    def __init__(
        self, meter: Meter, model: nn.Module, loss: MeteredLoss, count: int, report: Callable[[str], object]
    ) -> None:
        self._report = report
        self._meter, self._model, self._loss, self._count = meter, model, loss, count
        self._storages = meter.storages
        self._played = {0, PATTERN, count - 2, count - 1}
        self._calls: Counter[Hashable] = Counter()
        self._visits: dict[tuple[Hashable, int], Visit] = {}
        self._repeats_loss = True
        self._depth = 0
        self._open: tuple[Visit, Recording] | None = None
        """The visit whose backward pass is running, if it is played."""
        self._passed: list[Visit] = []
        """Visits that the running backward pass has played."""
        self._repeated: list[Visit] = []
        """Patterns that the running backward pass has repeated."""
        self._outside: list[Piece] = []
        """Storages that the running backward pass allocated or freed outside of all visits."""
        self._outside_from = 0
        """Position of the first change that may belong to them and has not been looked at."""
        with meter.paused():
            # Gives every repeated pass an input that requires a gradient, even where no tensor among its inputs does
            self._anchor = torch.zeros((), requires_grad=True)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within this context, calls of the model and of the loss are watched or repeated.

        Raises:
            NotAlike: micro-batches may differ.
        """
        original = type(self._model)
        repetition = self

        def call(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return repetition._call(MODEL, lambda: original.__call__(model, *args, **kwargs), (args, kwargs))

        # A separate class, since Python looks up `__call__` on the class, and all hooks of the model belong to a call.
        self._model.__class__ = type(original.__name__, (original,), {"__call__": call})
        self._loss.around = lambda play, arguments: self._call(LOSS, play, arguments)
        try:
            with patch.object(torch.autograd, "backward", self._around_backward(torch.autograd.backward)):
                yield
        finally:
            self._model.__class__ = original
            self._loss.around = None
        self._compare()

    # --- calls -----------------------------------------------------------------------------------------------------

    def _call(self, what: str, play: Callable[[], Any], arguments: Any) -> Any:
        # Without gradients there is no backward pass to repeat, and of so few micro-batches all are played
        if not torch.is_grad_enabled() or self._count <= len(self._played):
            return play()
        leaves = tree_leaves(arguments)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        trained = [tensor for tensor in tensors if tensor.requires_grad]
        # Of a loss with several such inputs, no hook would show where its backward pass ends and the model's begins.
        if what == LOSS and not (self._repeats_loss and len(trained) == 1):
            return play()
        layout = (
            (Shape.of(leaf), leaf.requires_grad, leaf.is_leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves
        )
        key = (what, *layout)
        number = self._calls[key]
        self._calls[key] += 1
        if what == MODEL:
            self._report(f"micro-batch {number + 1} of {self._count}")
        known = [self._storages.find(tensor) is not None for tensor in tensors]
        visit = Visit(number, [*map(weakref.ref, tensors)], [*map(weakref.ref, trained)], known)
        if number in self._played:
            self._visits[key, number] = visit
            return self._play(visit, play) if what == MODEL else self._play_loss(key, visit, play, trained[0])
        pattern = self._visits[key, PATTERN]
        outputs = _Repeated.apply(self, visit, pattern, tensors, self._anchor, *trained)
        return tree_unflatten(outputs, pattern.structure)

    def _play(self, visit: Visit, play: Callable[[], Any]) -> Any:
        result, problem = self._record_forward(visit, play)
        if problem:
            raise NotAlike(problem)
        if not all(visit.differentiable):
            raise NotAlike("an output that takes no part in the backward pass")
        return result

    def _play_loss(self, key: Hashable, visit: Visit, play: Callable[[], Any], hidden: Tensor) -> Any:
        result, problem = self._record_forward(visit, play)
        if problem and visit.number == 0:  # it is played in all micro-batches instead
            self._repeats_loss = False
            # `_compare` looks only at sections and losses that are repeated
            del self._calls[key], self._visits[key, 0]
            return result
        if problem:
            raise NotAlike(problem)
        hook_gradient_first(hidden, self._end_loss(visit))
        return result

    def _record_forward(self, visit: Visit, play: Callable[[], Any]) -> tuple[Any, str]:
        """Returns the result of a pass, and why it cannot be repeated, if so."""
        recording = Recording(self._meter, None)
        visit.assign_inputs(self._storages)
        result = play()
        visit.assign_inputs(self._storages)  # again: the pass may be the first operation on some
        outputs, visit.structure = tree_flatten(result)
        made = recording.made()
        hooks = []
        for number, output in enumerate(outputs):
            if not isinstance(output, Tensor):
                return result, "an output that is no tensor"
            piece = self._storages.find(output)
            if piece is None or id(piece) not in made or piece in visit.roles.values():
                return result, "an output that is a part of another tensor"
            visit.roles["output", number] = piece
            visit.outputs.append(Shape.of(output))
            visit.differentiable.append(output.requires_grad)
            if output.requires_grad:
                hooks.append((output, self._begin_backward(visit, number)))
        if not hooks:
            return result, "outputs that take no part in the backward pass"
        for output, hook in hooks:
            hook_gradient_first(output, hook)
        visit.forward = recording.end(visit)
        return result, ""

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
        ended = (visit.roles[role] for role in passage.ended)
        for piece in {id(piece): piece for piece in ended}.values():  # two outputs may have one gradient
            self._storages.forget(piece)
        self._meter.flops += passage.flops
        self._meter.launches += passage.launches
        self._meter.transfers.update(passage.transfers)

    # --- backward passes -------------------------------------------------------------------------------------------

    def _around_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            if self._depth == 0:
                self._passed, self._repeated, self._outside = [], [], []
                self._outside_from = self._storages.position()
            # Calls may be nested: reentrant checkpointing calls this within a backward pass
            self._depth += 1
            try:
                result = original(*args, **kwargs)
            finally:
                self._depth -= 1
            if self._depth == 0:
                self._end_backward()
            return result

        return backward

    def _look_outside(self) -> None:
        # Such as the gradient of the loss: real in every micro-batch, and freed when the backward pass ends.
        self._outside += [piece for piece, _ in self._storages.since(self._outside_from)]

    def _begin_backward(self, visit: Visit, number: int) -> Callable[[Tensor], None]:
        def begin(gradient: Tensor) -> None:
            if self._depth == 0:
                raise NotAlike("a backward pass in parts")
            if self._open is None:
                if not all(self._storages.has(piece) for (kind, _), piece in visit.roles.items() if kind == "input"):
                    raise NotAlike("an input that is freed before the backward pass")
                self._look_outside()
                self._open = visit, Recording(self._meter, visit, ignored=set(map(id, self._outside)))
            if self._open[0] is not visit:
                raise NotAlike("a backward pass through several sections")
            piece = self._storages.find(gradient)
            if piece is not None:
                visit.roles.setdefault(("gradient of output", number), piece)

        return begin

    def _end_loss(self, visit: Visit) -> Callable[[Tensor], None]:
        """Returns a hook on the gradient of the loss's input: behind it, the backward pass through the model begins."""

        def end(gradient: Tensor) -> None:
            if self._open is None or self._open[0] is not visit:
                raise NotAlike("a loss whose input is used elsewhere")
            _, recording = self._open
            visit.assign_gradient(0, gradient, self._storages, recording.made())
            self._end_visit(visit, recording)

        return end

    def _end_visit(self, visit: Visit, recording: Recording) -> None:
        visit.backward = recording.end(visit)
        self._passed.append(visit)
        self._open = None
        self._outside_from = self._storages.position()

    def _end_backward(self) -> None:
        if self._open is not None:
            visit, recording = self._open
            made = recording.made()
            for number, reference in enumerate(visit.trained):
                tensor = reference()
                if tensor is None or not tensor.is_leaf:
                    raise NotAlike("an input that is no leaf")
                if tensor.grad is not None:
                    visit.assign_gradient(number, tensor.grad, self._storages, made)
            self._end_visit(visit, recording)
        alive = set(map(id, self._storages.alive()))
        left = sorted(
            piece.bytes for piece in {id(piece): piece for piece in self._outside}.values() if id(piece) in alive
        )
        for visit in self._passed:
            visit.left = left
        # The gradient of a head, say, where the loss is played and the section is repeated: fsdp takes over what it
        # finds at the end of the pass, and here nobody does.
        if any(left != pattern.left for pattern in self._repeated):
            raise NotAlike("a backward pass of the loss that leaves something in memory")

    def _repeat_backward(self, visit: Visit, pattern: Visit, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        if pattern.backward is None:
            raise NotAlike("a backward pass that precedes the pattern's backward pass")
        self._repeated.append(pattern)
        self._look_outside()
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
        self._outside_from = self._storages.position()
        return made

    # --- comparisons -----------------------------------------------------------------------------------------------

    def _compare(self) -> None:
        if any(times != self._count for times in self._calls.values()):
            raise NotAlike("a section that is not called once for each micro-batch")
        patterns = {key: visit for (key, number), visit in self._visits.items() if number == PATTERN}
        for key, pattern in patterns.items():
            other = self._visits[key, self._count - 2]
            if [each.summary() for each in pattern.passages()] != [each.summary() for each in other.passages()]:
                raise NotAlike("micro-batches that differ")
        self._balance(patterns.values())

    def _balance(self, patterns: Iterable[Visit]) -> None:
        """Check that a micro-batch leaves nothing behind: of what repeated ones leave, nobody would see the end."""
        # For all sections and the loss together: the loss creates the gradient of a head, and FSDP takes it over at
        # the end of the backward pass, which belongs to the model.
        left: Counter[Any] = Counter()
        for pattern in patterns:
            for passage in pattern.passages():
                for number, (piece, change) in enumerate(passage.changes):
                    if number not in passage.places:
                        left[piece.classified()] += change
        if any(left.values()):
            raise NotAlike("micro-batches that leave something in memory")


class _Repeated(torch.autograd.Function):
    """A forward pass through a section or the loss, and its backward pass, repeated."""

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
        # Missing gradients stay None: zeros would be allocations that the pattern did not make
        ctx.set_materialize_grads(False)
        ctx.repetition, ctx.visit, ctx.pattern = repetition, visit, pattern
        ctx.inputs = inputs  # as the pattern does: all inputs exist until the backward pass
        outputs = repetition._repeat_forward(visit, pattern)
        passed = zip(outputs, pattern.differentiable, strict=True)
        ctx.mark_non_differentiable(*(output for output, differentiable in passed if not differentiable))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        made = ctx.repetition._repeat_backward(ctx.visit, ctx.pattern, gradients)
        # Released by the backward pass, as saved tensors are
        ctx.inputs = None
        # No gradients for the repetition, the visits, the list of inputs and the anchor
        return (None, None, None, None, None, *made)
