"""A device of pure Python, `train.device = "pretend"`, on which faults of code for GPUs show without a GPU.

Its tensors are in the host's memory, so all numbers are real and equal to the CPU's. Everything else is as on a GPU:

- tensors of the device and of the host cannot be mixed, generators neither;
- where the host waits for a value (`item`, a condition, a mask as an index, a copy that blocks) is counted by file and
  line, see `waits`;
- streams and events order accesses to memory: a copy that is read before its event, pinned memory that is written while
  a copy reads it, a tensor that is freed while another stream uses it, end the run with the line;
- memory is counted.

A process has the device after `register()`, or with `FORGE_PRETEND=1` in its environment. Each process has one device.
Compiled code and CUDA's own kernels are not tried.
"""

from __future__ import annotations

import inspect
import os
import pickle
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from forge_pretend import VARIABLE, load
from forge_testing.torch_internals import DATA, Generator, generator_address, set_up_device

from . import module
from .clocks import PretendedError, clocks
from .memory import Pinned, pin, pinned_access
from .tensor import NAME, PretendTensor, copy_from, generators

__all__ = ["NAME", "Pinned", "PretendTensor", "PretendedError", "on_device", "register", "reset_waits", "waits"]

FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "rand", "randn", "empty_strided", "empty_like", "zeros_like")


def waits() -> Counter[tuple[str, str]]:
    """How often the host has waited for the device, by (what for, file and line), since `reset_waits`."""
    return clocks.waits


def reset_waits() -> None:
    """Count from 0 again."""
    clocks.waits.clear()


@cache
def register() -> None:
    """Make the device known to torch, in this process and for good. It becomes the accelerator that `auto` takes."""
    set_up_device(NAME, module)
    _implement("empty.memory_format", torch.ops.aten.empty.memory_format)
    _implement("empty_strided", torch.ops.aten.empty_strided.default)
    _library.impl("_copy_from", copy_from, "PrivateUse1")
    # Collectives are made on the numbers, which are the host's.
    dist.Backend.default_device_backend_map[NAME] = "gloo"
    dist.Backend.backend_capability["gloo"].append(NAME)
    torch.Tensor.data = _Data()  # type: ignore[assignment]
    torch.Tensor.pin_memory = lambda self, device=None: pin(self.clone())  # type: ignore[method-assign, assignment]
    torch.Tensor.is_pinned = (  # type: ignore[method-assign]
        lambda self, device=None: self.device.type == "cpu" and pinned_access(self) is not None  # type: ignore[arg-type]
    )
    for name in FACTORIES:
        setattr(torch, name, _pinning(getattr(torch, name)))
    torch.Generator = _Generator  # type: ignore[misc]


def on_device(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a process that has the device, so that this one keeps its own.

    Args:
        function: Of a module, or a class method, in a file that can be imported by itself.
        arguments: Of the function; they are pickled, as its result is.

    Returns:
        Its result.

    Raises:
        AssertionError: It raised; the message has its traceback.
    """
    owner = getattr(function, "__self__", None)  # the class of a class method, which may inherit it from elsewhere
    name = f"{owner.__qualname__}.{function.__name__}" if owner is not None else function.__qualname__
    with tempfile.NamedTemporaryFile() as result:
        command = [sys.executable, "-m", __name__, inspect.getfile(owner or function), name, result.name]
        given = pickle.dumps(sys.path) + pickle.dumps(arguments)
        done = subprocess.run(command, input=given, capture_output=True, env={**os.environ, VARIABLE: "1"}, check=False)
        if done.returncode:
            raise AssertionError((done.stdout + done.stderr).decode(errors="replace"))
        return pickle.loads(Path(result.name).read_bytes())  # noqa: S301 - of a process of ours


def _implement(name: str, operator: Any) -> None:
    def make(*args: Any, **options: Any) -> Tensor:
        options.pop("device", None)
        options.pop("pin_memory", None)
        return PretendTensor(operator(*args, device="cpu", **options))

    _library.impl(name, make, "PrivateUse1")


_library = torch.library.Library("aten", "IMPL")


def _pinning(factory: Any) -> Any:
    """A function of torch that makes tensors, with pinned memory from here: torch takes it from a backend's C++."""

    @wraps(factory)
    def made(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        tensor = factory(*args, **options)
        return pin(tensor) if pin_memory and tensor.device.type == "cpu" else tensor

    return made


class _Data:
    """`Tensor.data`, by which a tensor of the host can become one of the device, as it can with CUDA."""

    def __get__(self, tensor: Tensor | None, owner: Any = None) -> Any:
        return self if tensor is None else DATA.__get__(tensor)

    def __set__(self, tensor: Tensor, other: Tensor) -> None:
        if isinstance(other, PretendTensor):
            torch.utils.swap_tensors(tensor, PretendTensor(other.raw, tensor.requires_grad))
        else:
            DATA.__set__(tensor, other)


class _AnyGenerator(type(Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, Generator)


class _Generator(Generator, metaclass=_AnyGenerator):  # type: ignore[misc]
    """`torch.Generator`, which may be of the pretended device too; it draws the numbers that one of the CPU draws."""

    def __new__(cls, device: Any = "cpu") -> Any:
        on_device = torch.device(device).type == NAME
        made = super().__new__(cls, "cpu" if on_device else device)  # type: ignore[call-arg]
        if on_device:
            generators.add(generator_address(made))
        return made

    def __del__(self) -> None:
        generators.discard(generator_address(self))

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        own = generator_address(self) in generators
        return torch.device(NAME, 0) if own else Generator.device.__get__(self)


load()
