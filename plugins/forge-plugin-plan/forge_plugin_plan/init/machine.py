"""The machine that the command runs on: its device, speed and free memory."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from forge_plugin_plan.init.sizes import Machine

if TYPE_CHECKING:
    import torch

SECONDS = 0.5
"""Time of a measurement."""
PARTS = 16
"""A product with 1/16 of the rows is timed first; the full product is run only if it fits into the time."""


def stated_machine(tflops: float, memory_gb: float | None) -> Machine:
    """A machine that the user describes; not necessarily this one."""
    memory = None if memory_gb is None else round(memory_gb * 1e9)
    return Machine(name="another machine", flops=tflops * 1e12, precision="bf16", memory=memory, measured=False)


def this_machine() -> Machine:
    """Measure this machine.

    The best of several products counts: on a busy machine the others say how busy it is.
    """
    import torch

    on_gpu = torch.cuda.is_available()
    memory: int | None
    device = torch.device("cuda" if on_gpu else "cpu")
    if on_gpu:
        # Free memory and not the total: other processes may hold a part of it
        name, memory = torch.cuda.get_device_name(), torch.cuda.mem_get_info()[0]
    else:
        cores = torch.get_num_threads()
        name, memory = f"{cores} core{'s' if cores > 1 else ''}", free_memory()
    speeds = {name: product_speed(dtype, device) for name, dtype in _dtypes(on_gpu).items()}
    precision = max(speeds, key=speeds.__getitem__)
    return Machine(name=name, flops=speeds[precision], precision=precision, memory=memory)


def _dtypes(on_gpu: bool) -> dict[str, torch.dtype]:
    import torch

    # Not every processor computes in bfloat16: some emulate it, slower than float32.
    return {"bf16": torch.bfloat16} if on_gpu else {"fp32": torch.float32, "bf16": torch.bfloat16}


def product_speed(dtype: torch.dtype, device: torch.device) -> float:
    """Returns the FLOP/s of the fastest of some products of matrices."""
    import torch

    # Large enough for full speed, and small enough for several products in the time
    rows, features = (8192, 4096) if device.type == "cuda" else (2048, 512)
    a = torch.randn(rows, features, device=device).to(dtype)
    b = torch.randn(features, 4 * features, device=device).to(dtype)
    per_row = 2 * features * 4 * features
    # A processor that emulates a dtype takes many seconds for all rows. Twice, as the first also sets up threads.
    part = rows // PARTS
    best = min(_seconds(a[:part], b) for _ in range(2))
    if PARTS * best > 2 * SECONDS:
        return part * per_row / best
    end, best = time.perf_counter() + SECONDS, float("inf")
    # At least one product, however slow it is
    while time.perf_counter() < end or best == float("inf"):
        best = min(best, _seconds(a, b))
    return rows * per_row / best


def _seconds(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns the time of a product."""
    import torch

    started = time.perf_counter()
    a @ b
    if a.device.type == "cuda":
        # Kernels are asynchronous: without this, only their launch would be timed
        torch.cuda.synchronize()
    return time.perf_counter() - started


def free_memory() -> int | None:
    """Returns the bytes of memory that are free, a cgroup's limit included; None where it is not known."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        # MemAvailable includes the page cache that the kernel can give up; MemFree does not
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        # Without /proc, as on macOS: all physical memory, free or not
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    try:
        # In a container, the limit of the cgroup may be below the memory of the host
        return min(free, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # there is no cgroup, or no limit
        return free
