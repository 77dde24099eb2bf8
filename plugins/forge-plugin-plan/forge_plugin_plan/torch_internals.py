"""Everything private to torch that a planned step uses, beside `forge_kit.torch_internals`.

`tests/test_torch_internals.py` names the one that another torch has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.tensor._sharding_prop import ShardingPropagator

# The store of the backend "fake", whose collectives send nothing.
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_flatten, tree_unflatten

from forge_kit.torch_internals import FakeTensor, FakeTensorMode, TorchDispatchMode

__all__ = [
    "DEVICE",
    "FakeStore",
    "PlainDispatchMode",
    "QuickFakeTensorMode",
    "around_questions_of_dtensors",
    "backward_pass",
    "forget_sharding",
    "group_named",
    "hook_gradient_first",
    "identity_of",
    "is_view",
    "schema_of",
    "tree_flatten",
    "tree_unflatten",
    "without_vote",
]


_PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))


DEVICE = torch.ops.prim.device.default
"""The question of Python for the device of a fake tensor."""
_NOT_CACHED = (torch.ops.aten._unsafe_view.default,)
"""Operations that torch keeps out of its cache, since their signatures do not show that the result shares the storage.

A recipe does, and nothing but the key decides about their results. The product of each linear layer ends with one.
"""


class PlainDispatchMode(TorchDispatchMode):
    """A mode whose `__torch_dispatch__` is called as it is.

    torch wraps it, in each subclass, in what keeps `torch.compile` from tracing it. Nothing is compiled in a plan, and
    the wrapper takes longer than most operations do.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class QuickFakeTensorMode(FakeTensorMode):
    """A FakeTensorMode that finds operations in its cache sooner.

    torch takes 42 microseconds for an addition that is in its cache, and this mode 8: torch flattens 17 attributes of
    each tensor by `dataclasses.fields`, passes through several contexts, and sets 20 attributes of each result. Here
    the key has those attributes in which plain tensors may differ, and a result is made by a recipe, which is taken
    from what torch itself has made from its cache for the same key. All that is not plain is left to torch.

    It needs of torch that `FakeTensorMode` counts `cache_hits`, `cache_misses` and `cache_bypasses`, that nothing but
    the key decides about a result from its cache, and that attributes of fake tensors are in their `__dict__`.
    """

    _recipes: ClassVar[dict[tuple[object, ...], _Recipe]] = {}
    """Of all modes, as torch's cache is: their settings are the same."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # see `PlainDispatchMode`
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        kwargs = kwargs or {}
        if func.namespace == "profiler":  # marks of fsdp, two for each of its calls, which have no tensors
            return func(*args, **kwargs)
        # Results also depend on these two settings of the process
        key: list[object] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        plain = _identify(key, args, self) and (not kwargs or _identify(key, tuple(kwargs.items()), self))
        recipe = self._recipes.get(tuple(key)) if plain else None
        if recipe is not None:
            return recipe.follow(args, self)
        before = self._served()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        # One hit and nothing else: torch has made it from its cache, and not by operations that were in the cache.
        if plain and (func in _NOT_CACHED or self._served() == (before[0] + 1, before[1])):
            recipe = _Recipe.of(result, args, self)
            if recipe is not None:
                self._recipes[tuple(key)] = recipe
        return result

    @staticmethod
    def _served() -> tuple[int, int]:
        cache = FakeTensorMode
        return cache.cache_hits, cache.cache_misses + sum(cache.cache_bypasses.values())


def _identify(key: list[object], args: Any, mode: FakeTensorMode) -> bool:
    """Append what identifies arguments to a key. Returns whether all of them are plain."""
    # Shows where a nested list ends: ([a], b) and ([a, b],) have different keys
    key.append(len(args))
    for arg in args:
        kind = type(arg)
        if kind in _PLAIN:
            # With the type, as 1, 1.0 and True are equal
            key.append(kind)
            key.append(arg)
        elif kind is FakeTensor and _plain(arg, mode):
            key.append(_identity(arg))
        elif kind is list or kind is tuple:
            if not _identify(key, arg, mode):
                return False
        else:
            return False
    return True


@frozen
class _Part:
    """How to make one tensor of a result."""

    argument: int
    """Number of the argument that it is, or whose storage it shares; -1: none."""
    same: bool
    """Whether it is the argument itself."""
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    attributes: Mapping[str, Any]

    @classmethod
    def of(cls, tensor: Any, args: Sequence[Any], mode: FakeTensorMode) -> _Part | None:
        """Returns the recipe of a tensor, or None if it is not plain."""
        if type(tensor) is not FakeTensor or not _plain(tensor, mode) or tensor.requires_grad or tensor.is_inference():
            return None
        # A recipe does not set these bits
        if tensor.is_conj() or tensor.is_neg():
            return None
        same = [number for number, arg in enumerate(args) if arg is tensor]
        storage = identity_of(tensor.untyped_storage())
        shared = [
            number
            for number, arg in enumerate(args)
            if isinstance(arg, Tensor) and identity_of(arg.untyped_storage()) == storage
        ]
        return cls(
            argument=(same or shared or [-1])[0],
            same=bool(same),
            shape=tensor.shape,
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
            dtype=tensor.dtype,
            device=tensor.device,
            attributes={} if same else {name: value for name, value in vars(tensor).items() if name != "fake_mode"},
        )

    def make(self, args: Sequence[Any], mode: FakeTensorMode) -> Any:
        if self.same:
            return args[self.argument]
        meta = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        if self.argument >= 0:
            meta.set_(args[self.argument].untyped_storage(), self.offset, self.shape, self.stride)
        fake: Any = Tensor._make_subclass(
            FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=self.device
        )
        # As the constructor of FakeTensor does: there is no data to point to
        torch._C._set_throw_on_mutable_data_ptr(fake)
        vars(fake).update(self.attributes)
        fake.fake_mode = mode
        return fake


@frozen
class _Recipe:
    """How to make the result of an operation."""

    parts: Sequence[_Part]
    kind: type
    """Type of the result: of a tensor, a list or a tuple."""

    @classmethod
    def of(cls, result: Any, args: Sequence[Any], mode: FakeTensorMode) -> _Recipe | None:
        """Returns the recipe of a result, or None if the recipe would make another."""
        several = type(result) in (list, tuple)
        tensors = result if several else [result]
        parts = [part for tensor in tensors if (part := _Part.of(tensor, args, mode)) is not None]
        if len(parts) != len(tensors):
            return None
        pairs = zip(tensors, parts, strict=True)
        new = [identity_of(tensor.untyped_storage()) for tensor, part in pairs if part.argument < 0]
        if len(set(new)) != len(new):  # results that share one new storage
            return None
        recipe = cls(parts, type(result))
        # Tried once, and compared with the result of torch
        made = recipe.follow(args, mode)
        for first, second in zip(tensors, made if several else [made], strict=True):
            if _identity(first) != _identity(second) or first.device != second.device:
                return None
        return recipe

    def follow(self, args: Sequence[Any], mode: FakeTensorMode) -> Any:
        if self.kind is FakeTensor:
            return self.parts[0].make(args, mode)
        return self.kind(part.make(args, mode) for part in self.parts)


def _plain(tensor: FakeTensor, mode: FakeTensorMode) -> bool:
    fake: Any = tensor
    return (
        fake.fake_mode is mode
        and fake.constant is None
        and fake.layout is torch.strided
        and not fake._has_symbolic_sizes_strides
        and not fake.is_quantized
    )


def _identity(tensor: FakeTensor) -> tuple[object, ...]:
    return (
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.untyped_storage().nbytes(),
        tensor.dtype,
        tensor.fake_device,
        tensor.requires_grad,
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.is_inference(),
    )


def identity_of(storage: torch.UntypedStorage) -> int:
    """Returns what stays the same for a storage until it is freed: Python's objects for it come and go."""
    return storage._cdata


def backward_pass() -> int:
    """Returns the number of the backward pass that is running; -1: none."""
    return torch._C._current_graph_task_id()


def schema_of(operator: Any) -> Any:
    """Returns the signature of an operator of the dispatcher, which shows what it overwrites."""
    return operator._schema


def is_view(operator: Any) -> bool:
    """Returns whether the result of an operator of the dispatcher shares the memory of an argument."""
    return bool(operator.is_view)


def group_named(name: str) -> dist.ProcessGroup:
    """Returns the process group that functional collectives know by its name."""
    resolve: Any = distributed_c10d
    return resolve._resolve_process_group(name)


def hook_gradient_first(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Call `hook` with the gradient of a tensor, before all other hooks of the tensor."""
    handle = tensor.register_hook(hook)
    # Python's hooks of a tensor run in the order in which they were put into this dictionary, whose `move_to_end` the
    # engine does not see; fsdp registers some during the forward pass.
    hooks: Any = tensor._backward_hooks
    for key in [key for key in hooks if key != handle.id]:
        hooks[key] = hooks.pop(key)


def around_questions_of_dtensors(ask: Callable[[Callable[[], Any]], Any]) -> AbstractContextManager[Any]:
    """A context in which `ask` calls what DTensors compute on fake tensors to find out a shape."""
    original: Any = ShardingPropagator._propagate_tensor_meta_non_cached

    def asked(propagator: Any, schema: Any) -> Any:
        return ask(lambda: original(propagator, schema))

    return patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", asked)


def forget_sharding() -> None:
    """Clear DTensor's caches of shardings: they hold on to meshes, which another world's equal."""
    from torch.distributed.tensor import DTensor

    dispatcher: Any = DTensor._op_dispatcher
    native: Any = torch._C
    try:
        dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
        native._clear_DTensor_sharding_propagator_cache()
    except AttributeError:  # in another version of torch; importing its function takes a second
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


def without_vote() -> AbstractContextManager[Any]:
    """A context in which torch's pipelines take for granted that all stages know the shapes they receive and send."""
    # Since 2.13, torch's pipelines vote before their first step on whether all stages know the shapes that they receive
    # and send. Nobody answers here. The stages of a job must know them, or the step fails.
    from torch.distributed.pipelining import schedules

    here: Any = schedules
    base: Any = here._PipelineSchedule
    if not hasattr(base, "_warmup_p2p"):
        return nullcontext()

    def agree(schedule: Any, stages: Sequence[Any], has_backward: bool, p2p_done: bool) -> None:
        del schedule, has_backward, p2p_done
        for stage in stages:
            stage._inference_mode = here.InferenceMode.STATIC

    return patch.object(base, "_warmup_p2p", agree)
