"""What multiplies float32 matrices on a CPU: torch's BLAS, or oneDNN.

In torch's wheels for x86, BLAS is MKL, which leaves the AVX-512 of AMD processors unused: on a Zen 5, oneDNN takes less
than half of its time. torch asks oneDNN where products may round to bfloat16 inside; on a processor without AMX oneDNN
does not do so, and gives what float32 gives. Here that is tried before it is relied on.

oneDNN makes a kernel for every size that it meets, which takes longer than most products and stays in memory. So only
products of some size go there, whose sizes are multiples of 32: of those there are few. The choice is made in torch's
dispatcher, below autograd, compilers and whatever else watches a run, for every product of a run.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.library import Library, get_kernel

MULTIPLE = 32
"""Sizes of the matrices that oneDNN is given in float32 are multiples of this."""
LEAST = 2**21
"""Multiplications from which oneDNN is the faster one, 128 x 128 x 128."""
CPU_INFO = Path("/proc/cpuinfo")

_FIRST = dict.fromkeys(("mm", "mm.out", "bmm", "bmm.out"), 0)
_FIRST |= {f"{name}{form}": 1 for name in ("addmm", "baddbmm") for form in ("", ".out", "_")}
"""torch's products, and which of their arguments is the first matrix."""

_by_onednn = False
_library: Library | None = None


def set_float32_matmul(asked: str, device: torch.device) -> None:
    """Products of float32 matrices in this process are computed as `train.float32_matmul` asks from now on."""
    global _by_onednn, _library
    torch.set_float32_matmul_precision("highest" if asked == "auto" else asked)
    _by_onednn = asked == "auto" and device.type == "cpu" and _mkl_is_slow() and _keeps_float32()
    if _by_onednn and _library is None:
        _library = _take_over()


def float32_choice(asked: str, device: torch.device) -> Iterator[tuple[str, str, str]]:
    """What was chosen, and why, for the plan; nothing where there was no choice."""
    if asked != "auto" or device.type != "cpu":
        return
    if _by_onednn:
        yield "products", "oneDNN", "MKL does not use the AVX-512 of this AMD processor; as exact: tried"
    else:
        yield "products", "BLAS", "no AMD processor with AVX-512, or oneDNN does not keep float32 there"


def multiplied_by(dtype: torch.dtype) -> Literal["BLAS", "oneDNN"]:
    """What computes large products of matrices of a dtype on a CPU, in this process."""
    return "oneDNN" if dtype.itemsize == 2 or (dtype == torch.float32 and _by_onednn) else "BLAS"


def size_multiple(dtype: torch.dtype) -> int:
    """Sizes of products on a CPU that vary from step to step are best filled up to a multiple of this, so that they are
    few: more than 1 for what oneDNN computes."""
    return MULTIPLE if multiplied_by(dtype) == "oneDNN" else 1


@functools.cache
def _mkl_is_slow() -> bool:
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    with suppress(OSError):
        return torch.backends.cpu.get_cpu_capability() == "AVX512" and "AuthenticAMD" in CPU_INFO.read_text()
    return False


def _keeps_float32() -> bool:
    """Whether oneDNN's products keep what bfloat16 and TensorFloat-32 would round away."""
    exact = torch.full((256, 256), 1 + 2.0**-20)
    return torch.equal(_asking_onednn(torch.mm, exact, torch.eye(256)), exact)


def _take_over() -> Library:
    """Kernels of torch's products stand behind ours while the library lives."""
    library = Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of torch, that kernels are replaced
        for name, first in _FIRST.items():
            kernel = functools.partial(_multiply, get_kernel(f"aten::{name}", "CPU"), first)
            library.impl(name, kernel, "CPU", with_keyset=True)
    return library


def _multiply(original: Any, first: int, keys: Any, *arguments: Any, **options: Any) -> Tensor:
    """One of torch's products, by oneDNN where that is worth it."""
    call = functools.partial(original.call_boxed, keys)
    if _by_onednn and _worth_it(arguments[first], arguments[first + 1]):
        return _asking_onednn(call, *arguments, **options)
    return call(*arguments, **options)


def _worth_it(a: Tensor, b: Tensor) -> bool:
    rows, inner, columns = a.shape[-2], a.shape[-1], b.shape[-1]
    return (
        a.dtype == torch.float32
        and a.numel() * columns >= LEAST
        and not (rows % MULTIPLE or inner % MULTIPLE or columns % MULTIPLE)
    )


def _asking_onednn(call: Any, *arguments: Any, **options: Any) -> Tensor:
    asked = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = asked.fp32_precision
    asked.fp32_precision = "bf16"
    try:
        return call(*arguments, **options)
    finally:
        asked.fp32_precision = before
