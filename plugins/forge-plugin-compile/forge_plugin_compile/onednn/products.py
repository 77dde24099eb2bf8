"""oneDNN in place of BLAS, for float32 matrix products on a CPU.

torch uses oneDNN for float32 products only if they may be rounded to bfloat16 inside; on a processor without AMX oneDNN
does not round, and returns the same as float32. A small product tests this before oneDNN is used.

oneDNN compiles a kernel for every size that it meets, which takes longer than most products, and keeps it in memory. So
it receives only large products whose sizes are multiples of 32, or that have at most 32 rows, of which a run has few.
The choice is made in torch's dispatcher, below autograd and compilers, so that it applies to every product of a run.
"""

from __future__ import annotations

import functools
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, get_kernel

from forge_kit.nn.products import MULTIPLE, multiply_float32_by

LEAST = 2**21
"""Multiplications from which oneDNN is faster: 128 x 128 x 128."""
CPU_INFO = Path("/proc/cpuinfo")

_FIRST = dict.fromkeys(("mm", "mm.out", "bmm", "bmm.out"), 0)
# Argument 0 is the summand
_FIRST |= {f"{name}{form}": 1 for name in ("addmm", "baddbmm") for form in ("", ".out", "_")}
"""torch's products, each with the index of its first matrix among the arguments."""

_active = False
_library: Library | None = None


def is_faster() -> bool:
    """Whether oneDNN is faster than BLAS on this processor, and as exact."""
    return _mkl_is_slow() and _keeps_float32()


def take_over() -> None:
    """Let oneDNN compute float32 products in this process, until `give_back`."""
    global _active, _library
    if _library is None:
        _library = _install()
    _active = True
    multiply_float32_by("oneDNN")


def give_back() -> None:
    """Let BLAS compute them again."""
    global _active
    # The kernels stay registered and pass all products on to torch's own.
    _active = False
    multiply_float32_by("BLAS")


@functools.cache
def _mkl_is_slow() -> bool:
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    with suppress(OSError):
        return torch.backends.cpu.get_cpu_capability() == "AVX512" and "AuthenticAMD" in CPU_INFO.read_text()
    return False


def _keeps_float32() -> bool:
    """Whether oneDNN's products keep the bits that bfloat16 and TensorFloat-32 would round away."""
    exact = torch.full((256, 256), 1 + 2.0**-20)
    return torch.equal(_asking_onednn(torch.mm, exact, torch.eye(256)), exact)


def _install() -> Library:
    """Register kernels that take precedence over torch's own while the library object lives."""
    library = Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that kernels are overridden
        for name, first in _FIRST.items():
            kernel = functools.partial(_multiply, get_kernel(f"aten::{name}", "CPU"), first)
            library.impl(name, kernel, "CPU", with_keyset=True)
    return library


def _multiply(original: Any, first: int, keys: Any, *arguments: Any, **options: Any) -> Tensor:
    """Computes one of torch's products, by oneDNN where that is faster."""
    call = functools.partial(original.call_boxed, keys)
    if _active and _is_worth_it(arguments[first], arguments[first + 1]):
        return _asking_onednn(call, *arguments, **options)
    return call(*arguments, **options)


def _is_worth_it(a: Tensor, b: Tensor) -> bool:
    rows, inner, columns = a.shape[-2], a.shape[-1], b.shape[-1]
    return (
        a.dtype == torch.float32
        and a.numel() * columns >= LEAST
        and not (inner % MULTIPLE or columns % MULTIPLE)
        # Up to so many rows are a step of generation, which has the same few sizes again and again.
        and (rows <= MULTIPLE or not rows % MULTIPLE)
    )


def _asking_onednn(call: Any, *arguments: Any, **options: Any) -> Tensor:
    # For this call and not for the whole run: torch would send products of every size to oneDNN.
    setting = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = setting.fp32_precision
    setting.fp32_precision = "bf16"
    try:
        return call(*arguments, **options)
    finally:
        setting.fp32_precision = before
