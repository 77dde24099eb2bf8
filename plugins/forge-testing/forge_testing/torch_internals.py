"""What the tools of tests use that torch keeps to itself; `test_torch_internals.py` names what a torch has changed."""

from __future__ import annotations

import importlib
import traceback
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo
from torch.utils._device import _device_constructors
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend


def share_device_of_gloo() -> None:
    """Make the process groups that this process creates from here on share one device of gloo.

    A device has a thread that wakes a hundred times per second, and torch creates one per group: with the hundred
    groups of a table of layouts, these threads take an eighth of the time.
    """
    create = ProcessGroupGloo.__init__
    device = ProcessGroupGloo.create_default_device()

    def with_device(
        self: ProcessGroupGloo, store: Any, rank: int, size: int, timeout: timedelta, **settings: Any
    ) -> None:
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._timeout = [device], timeout
        for name, value in settings.items():  # `enable_reconfigure` of torch 2.15
            setattr(options, name, value)
        create(self, store, rank, size, options)

    mock.patch.object(ProcessGroupGloo, "__init__", with_device).start()


def record_no_stacks() -> None:
    """Keep torch from recording the stack of each `FakeTensorMode` and each `torch.manual_seed`.

    It shows them in errors of mixed modes and of a device's first use. Below pytest, stacks are a hundred calls deep:
    recording them takes a hundredth of the time of all tests.
    """
    without = SimpleNamespace(**vars(traceback) | dict.fromkeys(("extract_stack", "format_stack"), list))
    for name in ("torch._subclasses.fake_tensor", "torch.cuda", "torch.xpu", "torch.mtia"):
        mock.patch.object(importlib.import_module(name), "traceback", without).start()


# --- for the pretended device --------------------------------------------------------------------------------------

Generator: Any = torch._C.Generator
"""The class of generators, which stays when `torch.Generator` is replaced."""
DATA: Any = torch._C.TensorBase.data
"""The descriptor behind `Tensor.data`."""
PLAIN_FUNCTION: Any = torch._C._disabled_torch_function_impl
"""A `__torch_function__` that does nothing, so that only operators are seen."""
without_subclasses: Any = torch._C.DisableTorchFunctionSubclass
"""Within it, functions of torch take subclasses of tensors as plain ones."""
__all__ = ["tree_flatten", "tree_leaves", "tree_map_only", "tree_unflatten"]


def set_up_device(name: str, module: Any) -> None:
    """Make a device known to torch, by a module of Python functions."""
    _device_constructors()  # keeps the functions that `with torch.device(...)` heeds, before others take their place
    _setup_privateuseone_for_python_backend(name, module)


def storage_address(tensor: Tensor) -> int:
    """What two tensors share if, and only if, they have the same storage."""
    return tensor.untyped_storage()._cdata


def generator_address(generator: Any) -> int:
    """What a generator keeps when torch passes it on, where the object in Python may be another."""
    return int(generator._cdata)


def as_subclass(kind: Any, tensor: Tensor) -> Any:
    """The same memory as a tensor of a subclass, whose functions it calls."""
    return Tensor._make_subclass(kind, tensor)  # type: ignore[attr-defined]


def wrapper(kind: Any, raw: Tensor, device: torch.device, requires_grad: bool) -> Any:
    """A tensor without memory on a device, in the shape of another."""
    form: dict[str, Any] = {"strides": raw.stride(), "storage_offset": raw.storage_offset(), "dtype": raw.dtype}
    return Tensor._make_wrapper_subclass(kind, raw.size(), device=device, requires_grad=requires_grad, **form)  # type: ignore[attr-defined]


def reshape_wrapper(tensor: Tensor, like: Tensor) -> None:
    """Give a tensor without memory the shape and strides of another, in place."""
    before = torch._C._meta_in_tls_dispatch_include()  # type: ignore[attr-defined]
    with no_dispatch():
        torch._C._set_meta_in_tls_dispatch_include(True)  # type: ignore[attr-defined]
        try:
            torch.ops.aten.set_.source_Tensor(tensor, like)
        finally:
            torch._C._set_meta_in_tls_dispatch_include(before)  # type: ignore[attr-defined]


def operator_name(operator: Any) -> str:
    """As `aten::add`, whatever the overload."""
    return str(operator._schema.name)


def overload_name(operator: Any) -> str:
    """As `Tensor` of `add.Tensor`."""
    return str(operator._overloadname)


def written_arguments(operator: Any) -> tuple[list[int], list[str]]:
    """Places and names of the arguments that an operator changes."""
    arguments = operator._schema.arguments
    written = [each.alias_info is not None and each.alias_info.is_write for each in arguments]
    numbers = [number for number, is_written in enumerate(written) if is_written]
    return numbers, [arguments[number].name for number in numbers]


def is_view(operator: Any) -> bool:
    """Whether an operator returns its argument in another shape, without a kernel."""
    aliases = [each.alias_info for each in operator._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)
