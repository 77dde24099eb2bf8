"""Memory of the pretended device and pinned memory of the host, with who uses it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from forge_testing.torch_internals import as_subclass, storage_address, tree_leaves, tree_map_only, without_subclasses

from .clocks import HOST, Access, clocks

_accesses: weakref.WeakValueDictionary[int, Access] = weakref.WeakValueDictionary()
"""By the storage's address. A record lives as long as the tensors that have this storage."""

WITHOUT_READING = {
    *("__get__", "size", "stride", "dim", "numel", "element_size", "is_contiguous", "is_pinned", "data_ptr", "__len__"),
    *("untyped_storage", "storage_offset", "nelement", "is_floating_point", "is_complex", "type", "__hash__", "nbytes"),
    *("detach", "view", "view_as", "reshape", "narrow", "split", "unbind", "select", "chunk", "__getitem__", "flatten"),
    *("split_with_sizes", "as_strided", "unsqueeze", "squeeze", "transpose", "t", "permute", "expand", "_is_view"),
}
"""Functions of a tensor that look at no value."""

ALWAYS_WRITE = {"__setitem__"}


class Memory:
    """Bytes on the device: now, and at most since the last reset."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def add(self, count: int) -> None:
        self.now += count
        self.peak = max(self.peak, self.now)


memory = Memory()


class DeviceAccess(Access):
    """Of memory on the device, which ends with the last tensor that has it."""

    def __del__(self) -> None:
        self.freed()
        memory.add(-self.size)

    size: int = 0

    def resized(self, size: int) -> None:
        memory.add(size - self.size)
        self.size = size


def access_of(raw: Tensor) -> Access:
    """The record of device memory, whose numbers are in `raw`."""
    address = storage_address(raw)
    found = _accesses.get(address)
    if found is None:
        found = _accesses[address] = DeviceAccess(clocks.allocate())
        found.resized(raw.untyped_storage().nbytes())
    return found


def pinned_access(tensor: Tensor) -> Access | None:
    """The record of the host's memory, if it is pinned."""
    found = _accesses.get(storage_address(tensor))
    return found if found is not None and found.born == HOST else None


class Pinned(Tensor):
    """A tensor in pinned memory of the host, which notices when the host is too early."""

    access: Access

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name == "is_pinned":
            return True
        originals = {}

        def plain(tensor: Pinned) -> Tensor:
            alias = tensor.as_subclass(Tensor)  # type: ignore[arg-type]
            originals[id(alias)] = tensor, alias
            return alias

        with without_subclasses():
            _check(name, args, kwargs)
            args, kwargs = tree_map_only(Pinned, plain, (tuple(args), dict(kwargs)))
            result = function(*args, **kwargs)
            return tree_map_only(Tensor, lambda t: originals[id(t)][0] if id(t) in originals else _as_before(t), result)


def pin(tensor: Tensor) -> Tensor:
    """This memory of the host as pinned memory."""
    found = _accesses[storage_address(tensor)] = Access(HOST)
    pinned: Pinned = as_subclass(Pinned, tensor)
    pinned.access = found
    return pinned


def _as_before(tensor: Tensor) -> Tensor:
    """A result as a pinned tensor if it is a view of one."""
    if type(tensor) is not Tensor or tensor.device.type != "cpu" or (found := pinned_access(tensor)) is None:
        return tensor
    pinned: Pinned = as_subclass(Pinned, tensor)
    pinned.access = found
    return pinned


def _check(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise if the host reads what may not have arrived, or writes what the device may still need."""
    leaves = tree_leaves((args, kwargs))
    on_device = any(isinstance(each, Tensor) and each.device.type not in ("cpu", "meta") for each in leaves)
    if name in WITHOUT_READING or (name in ("to", "copy_") and (on_device or _names_device(leaves))):
        return  # a copy to or from the device is its operation, which notes the access itself
    writes = name in ALWAYS_WRITE or (name.endswith("_") and not name.endswith("__"))
    for number, each in enumerate(leaves):
        if isinstance(each, Pinned):
            if writes and number == 0:
                each.access.written_on_host()
            else:
                each.access.read_on_host()


def _names_device(leaves: Sequence[Any]) -> bool:
    named = [torch.device(each) for each in leaves if isinstance(each, (str, torch.device))]
    return any(device.type not in ("cpu", "meta") for device in named)
