"""oneDNN in place of BLAS, for float32 matrix products on a CPU.

torch uses oneDNN for float32 products only if they may be rounded to bfloat16 inside; on a processor without AMX oneDNN
does not round, and returns the same as float32. A small product tests this before oneDNN is used.

oneDNN compiles a kernel for every size that it meets, which takes longer than most products, and keeps it in memory. So
it receives only large products whose sizes are multiples of 32, or that have at most 32 rows, of which a run has few.
"""

from __future__ import annotations

import functools
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge_kit.nn.products import MULTIPLE
from forge_plugin_compile.products.dispatch import Call

LEAST = 2**21
"""Multiplications from which oneDNN is faster: 128 x 128 x 128."""
CPU_INFO = Path("/proc/cpuinfo")


class ByOneDNN:
    """A way for float32 products: oneDNN in place of BLAS."""

    @staticmethod
    def helps() -> bool:
        """Returns whether oneDNN is faster than BLAS on this processor, and as exact."""
        return _mkl_is_slow() and _keeps_float32()

    def takes(self, kernel: str, a: Tensor, b: Tensor) -> bool:
        """Returns whether two operands are large float32 matrices of sizes for which oneDNN is faster."""
        if a.dtype != torch.float32 or "attention" in kernel:
            return False
        rows, inner, columns = a.shape[-2], a.shape[-1], b.shape[-1]
        return (
            a.numel() * columns >= LEAST
            and not (inner % MULTIPLE or columns % MULTIPLE)
            # Up to so many rows are a step of generation, which has the same few sizes again and again.
            and (rows <= MULTIPLE or not rows % MULTIPLE)
        )

    def compute(self, call: Call, kernel: str, *arguments: Any, **options: Any) -> Any:
        """Returns the product; the kernel's name does not matter."""
        return _asking_onednn(call, *arguments, **options)


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


def _asking_onednn(call: Call, *arguments: Any, **options: Any) -> Tensor:
    # For this call and not for the whole run: torch would send products of every size to oneDNN.
    setting = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = setting.fp32_precision
    setting.fp32_precision = "bf16"
    try:
        return call(*arguments, **options)
    finally:
        setting.fp32_precision = before
