"""What multiplies float32 matrices on a CPU: torch's BLAS, or oneDNN.

In torch's wheels for x86, BLAS is MKL, which leaves the AVX-512 of AMD processors unused: on a Zen 5, oneDNN takes less
than half of its time. torch asks oneDNN where it may multiply in bfloat16 inside, that is, after
`set_float32_matmul_precision("medium")`, and on a processor without AMX oneDNN multiplies in float32 all the same. Here
that is tried before it is relied on.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

CPU_INFO = Path("/proc/cpuinfo")


def set_float32_matmul(asked: str, device: torch.device) -> None:
    """Products of float32 matrices in this process are computed as `train.float32_matmul` asks from now on."""
    torch.set_float32_matmul_precision("highest" if asked == "auto" else asked)
    if asked == "auto" and device.type == "cpu" and _mkl_is_slow():
        torch.set_float32_matmul_precision("medium")
        if not _keeps_float32():
            torch.set_float32_matmul_precision("highest")


def float32_choice(asked: str, device: torch.device) -> Iterator[tuple[str, str, str]]:
    """What was chosen, and why, for the plan; nothing where there was no choice."""
    if asked != "auto" or device.type != "cpu":
        return
    if torch.get_float32_matmul_precision() == "medium":
        yield "products", "oneDNN", "MKL does not use the AVX-512 of this AMD processor; as exact: tried"
    else:
        yield "products", "BLAS", "no AMD processor with AVX-512, or oneDNN does not keep float32 there"


@functools.cache
def _mkl_is_slow() -> bool:
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    with suppress(OSError):
        return torch.backends.cpu.get_cpu_capability() == "AVX512" and "AuthenticAMD" in CPU_INFO.read_text()
    return False


def _keeps_float32() -> bool:
    """Whether products keep what bfloat16 and TensorFloat-32 would round away."""
    exact = torch.full((256, 256), 1 + 2.0**-20)
    return torch.equal(exact @ torch.eye(256), exact)
