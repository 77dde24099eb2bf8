"""A point in one module of the model: copies the sampled positions of what passes.

Shapes: B sequences of a micro-batch, S positions, n sampled positions of each.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from forge_core.contracts.errors import ForgeError

if TYPE_CHECKING:
    from forge_core.auxiliary import Auxiliary
    from forge_plugin_taps.kinds import Edit
    from forge_plugin_taps.where import Where


class Marks(NamedTuple):
    """Entries of a micro-batch that specify which of its positions are sampled."""

    rows: Tensor
    """(B,) on the CPU: numbers of its sequences among this rank's, plus `PASSES` times the number of its pass."""
    inside: Tensor
    """(B, n): where each sampled position is in this rank's part of the sequence; -1: another rank has it."""
    rest: Tensor
    """The same between blocks, where sequence parallel divides positions."""
    whole: Tensor
    """(B, n): where each sampled position is in the whole sequence."""
    order: Tensor | None
    """(B, S): under context parallel, the index of each position of a sequence in the concatenation of all ranks'
    positions; None: not needed."""
    token: Tensor | None
    """Written to by all copies of a compiled block (see `_keep`); None outside of one."""


ENTRIES = ("taps_rows", "taps_inside", "taps_rest", "taps_whole", "taps_order")
"""Names in a batch of all but the last."""


PASSES = 2**32
"""Passes are counted in the upper half of `Marks.rows`: compiled code takes tensors, and no further one is needed."""


class Current:
    """The micro-batch that is passing through the model. One object for all sites."""

    def __init__(self, auxiliary: Auxiliary) -> None:
        self.auxiliary = auxiliary
        self.marks: Marks | None = None
        """None: nothing is sampled."""
        self.batch: Any = None
        self.edits: frozenset[str] = frozenset()
        """Names of the edits that are on."""
        self.outputs: tuple[Any, ...] = ()
        """All outputs of the module that returned last, where there are several."""
        self.decoding = False
        """Whether a cache holds earlier positions."""

    def enter(self, batch: Any) -> None:
        """Note the micro-batch, in whose forward pass the sites are called from now on."""
        self.batch = batch
        if ENTRIES[0] not in batch:
            self.marks = None
            return
        rows, inside, rest, whole, order = (batch.get(name) for name in ENTRIES)
        self.marks = Marks(rows, inside, rest, whole, order, _new_token(inside))

    def refresh(self) -> None:
        """Note that another block begins, which does not receive the micro-batch."""
        if self.marks is not None:
            self.marks = self.marks._replace(token=_new_token(self.marks.inside))


def _new_token(like: Tensor) -> Tensor | None:
    # One for each block: a compiled graph must change none of its inputs, which a backward pass may still need while
    # the next micro-batch of a pipeline goes forward.
    return torch.zeros(1, device=like.device) if torch.compiler.is_compiling() else None


class Site:
    """One point of one layer. Forward hooks of its module call `take`."""

    # Hooks and not another `forward`: blocks that differ in a function they call share no compiled graph, while the
    # attributes of sites that a trace reads are equal, or tensors.

    def __init__(self, name: str, axes: str, current: Current, *, values: bool, gradient: bool, copies: bool) -> None:
        """Set up a point.

        Args:
            name: its name in the model.
            axes: see `forge_kit.nn.taps.Axes`.
            current: shared by all sites.
            values: whether values are kept.
            gradient: whether gradients are kept.
            copies: whether the tensor is the last of its block, of which `fully_shard` must not get a view.
        """
        self.name, self.axes, self.current = name, axes, current
        self.values, self.gradient, self.copies = values, gradient, copies
        self.kept: dict[bool, dict[int, Tensor]] = {False: {}, True: {}}
        """Values (False) and gradients (True) of each micro-batch (B, n, …), by the number of its first sequence."""
        self._passes: dict[bool, dict[int, int]] = {False: {}, True: {}}
        """The pass in which each of these was kept."""
        self.edits: list[tuple[str, Edit, Callable[[Tensor, Any], Where]]] = []
        """Edits of the point by name, each with a function from a tensor and the batch to its `Where`."""
        self.edited = False
        """Whether an edit has been made since this was reset."""
        # A tensor and not a number, which would be another constant in the graph of each layer.
        self.number = torch.tensor(next(_numbers))
        _sites[int(self.number)] = self

    def take(self, x: Tensor) -> Tensor:
        """Edit x (B, S, …) and copy its sampled positions. Returns the tensor that replaces it."""
        for name, edit, where in self.edits:
            if name in self.current.edits:
                self.edited = True
                x = edit.apply(x, where(x, self.current.batch))
        marks = self.current.marks
        # A recomputed tensor was kept before, and the marks may belong to a later micro-batch. The gradient passes the
        # node of the first forward pass.
        if marks is None or self.current.auxiliary.recomputing:
            return x
        local = marks.rest if self.axes == "rest" else marks.inside
        if self.values:
            self.keep(pick(x.detach(), local), marks)
        # Where nothing before the point trains, autograd would never call the node
        if self.gradient and torch.is_grad_enabled() and x.requires_grad:
            return _GradientTap.apply(x, local, marks.rows, self.number, self.copies)
        return x

    def keep(self, picked: Tensor, marks: Marks) -> None:
        """Keep values (B, n, …) of the current micro-batch."""
        if marks.token is not None:
            _keep(marks.token, picked, marks.rows, self.number)
        else:
            self.put(False, marks.rows, picked)

    def put(self, gradient: bool, rows: Tensor, picked: Tensor) -> None:
        """Keep what was picked of a micro-batch; a later pass of the same micro-batch replaces it.

        Raises:
            ForgeError: there is such a value of this pass: of two calls, only one would be kept.
        """
        number, row = divmod(int(rows[0]), PASSES)
        if self._passes[gradient].get(row) == number:
            message = f"taps: the module of {self.name} is called twice in one forward pass, so it has no one value"
            raise ForgeError(f"{message}; choose points of modules that are called once")
        self._passes[gradient][row] = number
        self.kept[gradient][row] = picked

    def clear(self) -> None:
        """Forget what was kept."""
        self.kept = {False: {}, True: {}}
        self._passes = {False: {}, True: {}}


_numbers = count()
_sites: WeakValueDictionary[int, Site] = WeakValueDictionary()
"""Sites by number, for compiled graphs, which cannot hold a Python object."""


def pick(x: Tensor, local: Tensor) -> Tensor:
    """Returns the positions `local` (B, n) of x (B, S, …); anything where it is -1."""
    rows = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    # Clamped and not selected: the shape of a selection depends on the data, so the host would wait for it
    return x[rows, local.clamp(min=0)]


# Opaque to the compiler: kept values belong to no graph, so no buffer must exist before the first trace, and none is
# changed that a graph holds for its backward pass. The graph must not find the call useless: it changes `token`, which
# leaves the block with `Current.marks`.
@torch.library.custom_op("forge_taps::keep", mutates_args={"token"})
def _keep(token: Tensor, picked: Tensor, rows: Tensor, number: Tensor) -> None:  # noqa: ARG001
    # A copy: the compiler may use the memory of its intermediate results again.
    _sites[int(number)].put(False, rows, picked.clone())


@_keep.register_fake
def _(*_: Tensor) -> None:
    return None


@torch.library.custom_op("forge_taps::keep_gradient", mutates_args=())
def _keep_gradient(grad: Tensor, local: Tensor, rows: Tensor, number: Tensor) -> Tensor:
    # In the path of the gradient, so that it is not left out, and a copy, which operators must return.
    _sites[int(number)].put(True, rows, pick(grad, local))
    return grad.clone()


@_keep_gradient.register_fake
def _(grad: Tensor, *_: Tensor) -> Tensor:
    return torch.empty_like(grad)


class _GradientTap(torch.autograd.Function):
    """The identity; its backward pass keeps the gradient of the sampled positions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, local: Tensor, rows: Tensor, number: Tensor, copies: bool) -> Tensor:
        ctx.compiled = torch.compiler.is_compiling()
        if ctx.compiled:
            ctx.save_for_backward(local, rows, number)
        else:  # saved tensors are recomputed under checkpointing, when another micro-batch may be the current one
            ctx.kept = local, rows, number
        return x.clone() if copies else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.compiled:
            return _keep_gradient(grad, *ctx.saved_tensors), None, None, None, None
        local, rows, number = ctx.kept
        _sites[int(number)].put(True, rows, pick(grad, local))
        return grad, None, None, None, None
