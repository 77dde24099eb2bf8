"""Watches the operations of a step: memory that they allocate, FLOPs, bytes that they send."""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, frozen
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry, shape_wrapper

from forge_core.contracts.errors import ForgeError
from forge_core.parallel.mesh import local_part
from forge_kit.torch_internals import FakeTensor
from forge_plugin_plan.kernels import FORMULAS, TEMPORARIES
from forge_plugin_plan.storages import Piece, Purpose, Storages
from forge_plugin_plan.torch_internals import (
    DEVICE,
    PlainDispatchMode,
    around_questions_of_dtensors,
    group_named,
    identity_of,
    is_view,
    schema_of,
)

Sent = Callable[[int, int], float]
"""(bytes of the whole tensor, ranks) -> bytes that each rank sends."""


def _ring(whole: int, ranks: int) -> float:
    """Each rank sends every part but one on."""
    return whole * (ranks - 1) / ranks


def _both_ways(whole: int, ranks: int) -> float:
    return 2 * _ring(whole, ranks)


def _once(whole: int, _ranks: int) -> float:
    return whole


def _nothing(_whole: int, _ranks: int) -> float:
    """A message is counted where it is sent."""
    return 0


# Wrapped as the formulas in torch's registry are: the wrapper replaces tensors by their shapes
_OWN_FORMULAS = {kernel: shape_wrapper(formula) for kernel, formula in FORMULAS.items()}
COLLECTIVES = ("c10d", "_c10d_functional")
KINDS: Mapping[str, tuple[str, Sent]] = {
    "_allgather_base_": ("all-gather", _ring),
    "allgather_": ("all-gather", _ring),
    "allgather_into_tensor_coalesced_": ("all-gather", _ring),
    "all_gather_into_tensor": ("all-gather", _ring),
    "all_gather_into_tensor_out": ("all-gather", _ring),
    "_reduce_scatter_base_": ("reduce-scatter", _ring),
    "reduce_scatter_": ("reduce-scatter", _ring),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", _ring),
    "reduce_scatter_tensor": ("reduce-scatter", _ring),
    # A ring reduces and scatters, then gathers: twice as many bytes as for one of the two
    "allreduce_": ("all-reduce", _both_ways),
    "all_reduce": ("all-reduce", _both_ways),
    "all_reduce_": ("all-reduce", _both_ways),
    "alltoall_base_": ("all-to-all", _ring),
    "alltoall_": ("all-to-all", _ring),
    "all_to_all_single": ("all-to-all", _ring),
    "broadcast_": ("broadcast", _ring),
    "broadcast": ("broadcast", _ring),
    "send": ("send", _once),
    "recv_": ("receive", _nothing),
    "recv_any_source_": ("receive", _nothing),
}
"""Kind of each operation of torch, and the bytes that a rank sends in it by the algorithm that sends least (rings)."""
WITHOUT_KERNEL = frozenset(
    {
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "resize_storage_bytes_"),
        *("_unsafe_view", "_reshape_alias", "_lazy_clone", "detach_", "lift_fresh", "set_", "record_stream"),
        *("promote_types", "scalar_tensor"),  # on the host
    }
)
"""Operations that compute nothing, beside views."""
SILENT = ("barrier", "monitored_barrier_", "wait_tensor")
"""Operations in which no tensor is sent."""


@frozen
class Transfer:
    """One collective, or one message."""

    kind: str
    group: str
    """Name of its process group."""
    whole: int
    """Bytes of the whole tensor: gathered, before it is scattered, reduced, or sent."""
    ranks: int

    @property
    def sent(self) -> float:
        """Bytes that each rank sends."""
        # All operations of a kind send equally much
        return next(sent for kind, sent in KINDS.values() if kind == self.kind)(self.whole, self.ranks)


class Meter(PlainDispatchMode):
    """Watches within `with meter.watching():`."""

    def __init__(self) -> None:
        super().__init__()
        self.storages = Storages()
        self.transfers: Counter[Transfer] = Counter()
        self.groups: dict[str, dist.ProcessGroup] = {}
        self.flops = 0.0
        self.launches = 0
        self._purpose: Purpose | None = None
        self._pausing = False

    # --- around a step ---------------------------------------------------------------------------------------------

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within this context, operations are watched, and what forward passes keep for the backward."""
        with ExitStack() as stack:
            stack.enter_context(self.storages.resizing())
            stack.enter_context(self._without_questions_of_dtensors())
            stack.enter_context(self)
            stack.enter_context(warnings.catch_warnings())
            # From torch 2.15 on, where selective checkpointing saves: what it saves is found without the hooks below
            warnings.filterwarnings("ignore", "A saved_tensors_hooks context", FutureWarning)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor))
            yield

    @contextmanager
    def making(self, purpose: Purpose) -> Iterator[None]:
        """Within this context, memory is allocated for `purpose`."""
        held, self._purpose = self._purpose, purpose
        try:
            yield
        finally:
            self._purpose = held

    def _without_questions_of_dtensors(self) -> AbstractContextManager:
        # DTensors determine shapes by operations on separate fake tensors, which a real step does not compute.
        def paused(ask: Callable[[], Any]) -> Any:
            with self.paused():
                return ask()

        return around_questions_of_dtensors(paused)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within this context, operations are not watched."""
        held, self._pausing = self._pausing, True
        try:
            yield
        finally:
            self._pausing = held

    def _keep(self, tensor: Tensor) -> Tensor:
        self.storages.keep(self.storages.piece(local_part(tensor))[0])
        return tensor.detach()  # the tensor itself, kept by the node that made it, would never be freed

    # --- every operation ----------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A short cut, as every access to `.device` in Python comes here
        if func is DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if any(issubclass(type_, DTensor) for type_ in types):
            return NotImplemented  # it is made of operations on this rank's part, which come here
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._pausing or func.namespace == "prim":  # a question, such as for the device
            return result
        # Not of the loss: tensors of a plan are the CPU's, and losses take smaller chunks there, of more operations
        self.launches += self._purpose is not Purpose.LOGITS and _launches(func)
        read = _tensors((args, kwargs))
        overwritten = _tensors(list(_overwritten(func, args, kwargs)))
        made = [*_tensors(result), *overwritten]
        if func.namespace in COLLECTIVES:
            self._communicate(func, args, result, (*read, *made))
        self._allocate(read, made, overwritten)
        packet = func.overloadpacket
        if (temporary := TEMPORARIES.get(packet)) is not None:
            self.storages.pass_through(temporary(*args, **kwargs))
        # Our formulas first: torch's own for attention count all pairs of positions
        if (formula := _OWN_FORMULAS.get(packet) or flop_registry.get(packet)) is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        return result

    # --- memory ----------------------------------------------------------------------------------------------------

    def _allocate(self, read: list[Tensor], made: list[Tensor], overwritten: list[Tensor]) -> None:
        pieces = [self._piece(tensor) for tensor in made]
        if self._only_weights(read, {id(self.storages.find(tensor)) for tensor in overwritten}):
            for piece in pieces:
                piece.copy_of_weights = True

    def _piece(self, tensor: Tensor) -> Piece:
        piece, new = self.storages.piece(tensor)
        if new:
            piece.purpose = self._purpose
        return piece

    def _only_weights(self, read: list[Tensor], overwritten: Set[int]) -> bool:
        """Whether an operation read weights alone: a cast, a copy, an all-gather."""
        # An operation does not read what it overwrites, though that is among its arguments
        sources = [piece for piece in map(self.storages.find, read) if id(piece) not in overwritten]
        return bool(sources) and all(
            piece is not None and (piece.copy_of_weights or piece.purpose in (Purpose.WEIGHTS, Purpose.BESIDE))
            for piece in sources
        )

    # --- communication ---------------------------------------------------------------------------------------------

    def _communicate(self, func: Any, args: Any, result: Any, tensors: Sequence[Tensor]) -> None:
        """Count a collective or a message.

        Raises:
            ForgeError: it is not known what a rank sends in this operation.
        """
        name = func.overloadpacket.__name__
        for tensor in tensors:
            self.storages.piece(tensor)[0].sent = True
        if name in SILENT:
            return
        if name not in KINDS:
            raise ForgeError(f"it is not known what a rank sends in {func}")
        kind, _ = KINDS[name]
        group = _group_of(args)
        self.groups[group.group_name] = group
        self.transfers[Transfer(kind, group.group_name, _largest((*args, result)), group.size())] += 1


class AllocationLog(PlainDispatchMode):
    """Within this context, storages that operations allocate are noted."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(type_, DTensor) for type_ in types):
            return NotImplemented  # it is made of operations on this rank's part, which come here
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            if tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                # Weak: a log that kept memory alive would change what it counts
                self._storages[identity_of(storage)] = weakref.ref(storage)
        return result

    def alive(self) -> list[torch.UntypedStorage]:
        """Returns the storages that still exist."""
        return [storage for reference in self._storages.values() if (storage := reference()) is not None]


def _tensors(tree: Any) -> list[Tensor]:
    """Returns the tensors among arguments or results: one by one, or in lists, tuples and dictionaries."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):
        return []
    return [tensor for branch in tree for tensor in _tensors(branch)]


@cache
def _launches(func: Any) -> bool:
    """Whether an operation starts a kernel: views, allocations and waits do not."""
    name = func.overloadpacket.__name__
    return not (is_view(func) or name in WITHOUT_KERNEL or name in SILENT or func.namespace == "profiler")


@cache
def _places_overwritten(func: Any) -> tuple[tuple[int, str], ...]:
    """Returns the arguments that an operation overwrites, each with its number and its name."""
    written = [
        (number, argument)
        for number, argument in enumerate(schema_of(func).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    # Operations in place also read what they write, as `add_` does; copies and `out` arguments do not
    copies = "copy" in schema_of(func).name
    if schema_of(func).name == "fsdp::all_gather_copy_in":  # it does not say so
        return ((1, "all_gather_output"),)
    return tuple((number, argument.name) for number, argument in written if copies or argument.kwarg_only)


def _overwritten(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    if func.namespace in COLLECTIVES:
        # `allgather_` and `_allgather_base_` write their first argument and do not read it
        yield args[0] if "gather" in schema_of(func).name else ()
        return
    for number, name in _places_overwritten(func):
        yield args[number] if number < len(args) else kwargs.get(name)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _largest(args: Any) -> int:
    """Returns the bytes of the largest argument or result, tensor or list of them: the whole tensor."""
    return max(sum(map(_bytes, _tensors(arg))) for arg in args)


def _group_of(args: Any) -> dist.ProcessGroup:
    """Returns the process group among the arguments of an operation, which may be its name."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(arg)
            except RuntimeError:  # the reduction, which is an object too
                continue
    # The group is the last string: one before it names the reduction
    names = [arg for arg in args if isinstance(arg, str)]
    return group_named(names[-1])


@define
class MeteredLoss:
    """A loss whose allocations are metered as logits."""

    loss: Any
    meter: Meter | None = None
    around: Callable[[Callable[[], Any], Any], Any] | None = None
    """Is called in place of the loss, with what calls the loss and with the arguments."""

    def __call__(self, *args: Any) -> Any:
        if self.meter is None:
            return self.loss(*args)
        with self.meter.making(Purpose.LOGITS):
            return self.loss(*args) if self.around is None else self.around(lambda: self.loss(*args), args)
