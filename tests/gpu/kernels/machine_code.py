"""What ptxas makes of a kernel of Inductor: registers, spills and shared memory."""

from __future__ import annotations

import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from attrs import frozen

from gpu.kernels.named_cuda import as_gpu

_BYTES = re.compile(r"'kernel_num_gb': ([0-9.e+-]+)")
NAME = "triton_kernel"
"""Of every kernel that is compiled: Inductor numbers them, and equal ones need not be compiled twice."""
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")


@frozen
class Code:
    """A compiled kernel."""

    registers: int
    """Of each thread."""
    spills: int
    """Bytes of local memory of each thread: what did not fit into registers."""
    shared: int
    """Bytes of shared memory of each block."""


def bytes_of(source: str) -> int:
    """Returns the bytes that a kernel reads and writes, by Inductor's estimate."""
    match = _BYTES.search(source)
    return round(float(match[1]) * 1e9) if match else 0


@cache
def compile_kernel(source: str, arch: str) -> Code:
    """Compile a kernel of Inductor for an architecture, without a GPU.

    Inductor times several configurations on the GPU and takes the fastest. Here they are compiled in its order until
    one does not spill, else the one that spills least counts.
    """
    with as_gpu(arch):
        from torch._inductor.codecache import _load_triton_kernel_from_source

        tuner: Any = _load_triton_kernel_from_source(NAME, source)
        codes = []
        for config in tuner.configs:
            codes.append(_compile(tuner, config, int(arch.removeprefix("sm_"))))
            if not codes[-1].spills:
                break
        return min(codes, key=lambda code: code.spills)


def _compile(tuner: Any, config: Any, capability: int) -> Code:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    meta = tuner._create_compile_meta(config)
    source = ASTSource(tuner.fn, meta["signature"], meta["constants"], meta["configs"][0])
    options = tuner._create_compile_options(config, meta)
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, spills = _usage(binary.asm["cubin"])
    return Code(registers, spills, binary.metadata.shared)


def _usage(cubin: bytes) -> tuple[int, int]:
    import triton

    assert triton.__file__ is not None
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    usage = _USAGE.search(text)
    if usage is None:
        raise RuntimeError(f"{tool.name} shows no registers: {text[:300]}")
    return int(usage[1]), int(usage[2])
