"""Tensors of the pretended device: the numbers lie in the host's memory, and everything else is as on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from forge_testing.torch_internals import (
    DATA,
    PLAIN_FUNCTION,
    Generator,
    generator_address,
    is_view,
    operator_name,
    overload_name,
    reshape_wrapper,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
    without_subclasses,
    wrapper,
    written_arguments,
)

from .clocks import PretendedError, clocks, place
from .memory import DeviceAccess, access_of, pin, pinned_access

NAME = "pretend"
generators: set[int] = set()
"""Addresses of generators that count as the device's."""

READ_VALUES = {
    "_local_scalar_dense": "a value as a number",
    "equal": "a comparison",
    "is_nonzero": "a condition",
    "nonzero": "a size that depends on values",
    "masked_select": "a size that depends on values",
    "unique_dim": "a size that depends on values",
    "_unique2": "a size that depends on values",
    "unique_consecutive": "a size that depends on values",
    "bincount": "a size that depends on values",
}
"""Operators for whose result the host waits, with what it waits for."""

INDEXING = {"index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_"}


class Storage:
    """What `untyped_storage()` returns: the host's storage, of which a change of size is noted."""

    def __init__(self, owner: PretendTensor) -> None:
        self._storage, self._access = owner.raw.untyped_storage(), owner.access

    def resize_(self, size: int) -> None:
        self._storage.resize_(size)
        self._access.resized(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)


class PretendTensor(Tensor):
    """A tensor on the device. `raw` has its numbers, on the host; only this package may look at them."""

    raw: Tensor
    access: DeviceAccess
    __torch_function__ = PLAIN_FUNCTION

    @staticmethod
    def __new__(cls: type[PretendTensor], raw: Tensor, requires_grad: bool = False) -> PretendTensor:
        """A tensor of the device with these numbers, which lie on the host."""
        made: PretendTensor = wrapper(cls, raw, torch.device(NAME, 0), requires_grad)
        made.raw, made.access = raw.detach(), access_of(raw)  # type: ignore[assignment]
        return made

    def __init__(self, raw: Tensor, requires_grad: bool = False) -> None:
        """As `__new__`."""

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        clocks.wait("a tensor as text")
        return f"{self.raw!r} on {NAME}"

    def __format__(self, spec: str) -> str:
        return format(self.item() if self.dim() == 0 else repr(self), spec)

    def untyped_storage(self) -> Any:
        return Storage(self)

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def record_stream(self, stream: Any) -> None:
        self.access.kept_for.add(stream.stream_id)

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, other: Tensor) -> None:
        DATA.__set__(self, other)
        self.raw, self.access = other.raw, other.access  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        called = SPECIAL.get(operator_name(function), _run)
        if not torch.is_inference_mode_enabled():
            return called(function, args, kwargs)
        with torch.inference_mode(False), torch.no_grad():  # such tensors have no wrapper: these are plain ones
            return called(function, args, kwargs)


def _run(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An operator on the device: its accesses are noted, and the host waits only where its result demands it."""
    if _is_on_device(kwargs.get("device")):
        kwargs["device"] = torch.device("cpu")
    elif kwargs.get("device") is not None:
        return _elsewhere(function, args, kwargs)
    name = operator_name(function).removeprefix("aten::")
    leaves, spec = tree_flatten((tuple(args), kwargs))
    own = [leaf for leaf in leaves if isinstance(leaf, PretendTensor)]
    _refuse_mixed(function, name, leaves, args)
    if not _is_view(function):
        _note(function, args, kwargs, own)
    raw_args, raw_kwargs = tree_unflatten(
        [leaf.raw if isinstance(leaf, PretendTensor) else leaf for leaf in leaves], spec
    )
    result = function(*raw_args, **raw_kwargs)
    if name in READ_VALUES:
        clocks.wait(READ_VALUES[name])
    given = {id(leaf.raw): leaf for leaf in own}
    outputs, shape = tree_flatten(result)
    wrapped = [given[id(each)] if id(each) in given else _wrap(each) for each in outputs]
    _follow(own)
    return tree_unflatten(wrapped, shape)


def _raw(leaf: Any) -> Any:
    return leaf.raw if isinstance(leaf, PretendTensor) else leaf


def _wrap(raw: Any) -> Any:
    """A result as a tensor of the device; other values as they are."""
    if not isinstance(raw, Tensor):
        return raw
    made = PretendTensor(raw)
    if made.access.writer is None:
        stream = clocks.current()
        made.access.writer = stream.stream_id, stream.time, ""
    return made


def _elsewhere(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Like one of ours, but on the host or the meta device: `empty_like(x, device="cpu")`."""
    leaves, spec = tree_flatten((tuple(args), kwargs))
    raw_args, raw_kwargs = tree_unflatten(
        [leaf.raw if isinstance(leaf, PretendTensor) else leaf for leaf in leaves], spec
    )
    pinned = raw_kwargs.pop("pin_memory", False)
    result = function(*raw_args, **raw_kwargs)
    return pin(result) if pinned else result


def _note(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], own: Sequence[PretendTensor]) -> None:
    """Queue the operator on the current stream, with what it reads and writes."""
    stream = clocks.current()
    where = place() if stream is not clocks.default else ""
    time = stream.launch()
    positions, names = _written(function)
    changed = tree_leaves([args[number] for number in positions if number < len(args)])
    changed += tree_leaves([kwargs[name] for name in names if name in kwargs])
    written = {id(each.access) for each in changed if isinstance(each, PretendTensor)}
    for each in own:
        (each.access.write if id(each.access) in written else each.access.read)(stream, time, where)


_written = cache(written_arguments)
_is_view = cache(is_view)


def _is_on_device(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def _refuse_mixed(function: Any, name: str, leaves: Sequence[Any], args: Sequence[Any]) -> None:
    """Raise for what CUDA refuses: tensors of the host that are no scalars, and generators of the host."""
    if name.startswith(("c10d::", "_c10d_functional::")):
        return
    for leaf in leaves:
        if isinstance(leaf, Generator) and generator_address(leaf) not in generators:
            raise PretendedError(f"{place()}: {name}: expected a generator of {NAME}, got one of {leaf.device}")
    host = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, PretendTensor)]
    if not host:
        return
    changed = [args[number] for number in _written(function)[0] if number < len(args)]
    if name in INDEXING and not isinstance(args[0], PretendTensor):
        raise PretendedError(f"{place()}: {name}: a tensor of the host is indexed by one of {NAME}")
    if name in INDEXING and all(each.dtype in (torch.int64, torch.int32, torch.bool, torch.uint8) for each in host):
        clocks.wait("indices that lie on the host")
        return
    if any(each.dim() > 0 for each in host) or any(each is one for each in tree_leaves(changed) for one in host):
        raise PretendedError(f"{place()}: {name}: tensors of {NAME} and of {host[0].device} are mixed")


def _follow(own: Sequence[PretendTensor]) -> None:
    """Give wrappers the shapes that an operator has given their tensors in place, as `t_` does, or one with `out=`."""
    for each in own:
        if each.raw.shape == each.shape and each.raw.stride() == each.stride():
            continue
        reshape_wrapper(each, PretendTensor(each.raw))


# --- operators of their own ---------------------------------------------------------------------------------------


def _index(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    indices = [each for each in tree_leaves(args[1]) if isinstance(each, PretendTensor)]
    if any(each.dtype in (torch.bool, torch.uint8) for each in indices):
        clocks.wait("a mask as an index, whose size depends on values")
    return _run(function, args, kwargs)


def _repeat_interleave(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if kwargs.get("output_size") is None and overload_name(function) == "Tensor":
        clocks.wait("the sum of repetitions, without output_size")
    return _run(function, args, kwargs)


def _copy(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`copy_` in any direction, `non_blocking` or not."""
    target, source = args[0], args[1]
    non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    if isinstance(target, PretendTensor) and isinstance(source, PretendTensor):
        return _run(function, args, kwargs)
    if isinstance(target, PretendTensor):
        _to_device(target, source, non_blocking)
    else:
        _to_host(target, source, non_blocking)
    return target


def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """`aten::_copy_from`, which torch calls where it goes past subclasses: `torch.tensor(..., device="pretend")`."""
    return _copy(None, (target, source, non_blocking), {})


def _to_device(target: PretendTensor, source: Tensor, non_blocking: bool) -> None:
    stream, where = clocks.current(), place()
    time = stream.launch()
    target.access.write(stream, time, where)
    pinned = pinned_access(source)
    if pinned is not None:
        pinned.read(stream, time, where)
    target.raw.copy_(source)
    if not non_blocking and source.dim() > 0:
        clocks.wait("a copy to the device that blocks")


def _to_host(target: Tensor, source: PretendTensor, non_blocking: bool) -> None:
    stream, where = clocks.current(), place()
    time = stream.launch()
    source.access.read(stream, time, where)
    pinned = pinned_access(target)
    if pinned is not None:
        pinned.write(stream, time, where)
    with without_subclasses():
        target.copy_(source.raw)
    if not non_blocking or pinned is None:
        clocks.wait("a copy to the host")


def _to_copy(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    source, device = args[0], kwargs.get("device")
    if device is None or _is_on_device(device):
        return _run(function, args, {**kwargs, "device": device and torch.device(NAME, 0)})
    if torch.device(device).type == "meta":
        return function(source.raw, **kwargs)
    # torch allocates pinned memory for a copy that does not block.
    non_blocking = bool(kwargs.get("non_blocking", False))
    options = {key: value for key, value in kwargs.items() if key not in ("non_blocking", "device")}
    room = torch.empty_like(function(source.raw, **options), device="cpu")
    target = pin(room) if non_blocking else room
    _to_host(target, source, non_blocking)
    return target


SPECIAL: dict[str, Callable[[Any, Sequence[Any], dict[str, Any]], Any]] = {
    "aten::copy_": _copy,
    "aten::_to_copy": _to_copy,
    "aten::index": _index,
    "aten::index_put": _index,
    "aten::index_put_": _index,
    "aten::_index_put_impl_": _index,
    "aten::_unsafe_index": _index,
    "aten::repeat_interleave": _repeat_interleave,
}
