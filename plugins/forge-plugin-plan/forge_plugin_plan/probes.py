"""Short measurements of a device and of the groups of ranks of a run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from forge_core.devices import query_device
from forge_plugin_plan.devices import wait_for
from forge_plugin_plan.measurements import Collective, Measurements, Product

LONG_S = 2e-3
"""A call that takes as long is large enough: its time is spent on arithmetic, or on bytes."""
REPEATS = 5
LAUNCHES = 200
SIZES = (1 << 10, 1 << 24)
"""Bytes of collectives: one whose time is its latency, and one whose time is its bytes."""


def measure(device: torch.device, dtype: torch.dtype, mesh: DeviceMesh | None) -> Measurements:
    """Measure products, memory, launches and collectives; takes some tens of milliseconds on a GPU. Collective.

    Args:
        device: device of this rank.
        dtype: compute dtype of the run; float32 is measured, too.
        mesh: ranks of the run.
    """
    with torch.no_grad():
        dtypes = dict.fromkeys((dtype, torch.float32))
        found = Measurements(
            device=query_device(device, "get_device_name") or device.type,
            memory=_memory(device),
            torch=torch.__version__,
            bandwidth=_bandwidth(device),
            launch=_launch(device),
            products=[_product(device, each) for each in dtypes],
            collectives=[*_collectives(device, mesh)] if mesh is not None else [],
        )
    # Or fragments of these tensors would stay with torch; unlike other functions of the module, it takes no device
    getattr(torch.get_device_module(device), "empty_cache", lambda: None)()
    return found


def _memory(device: torch.device) -> int:
    free_and_total = query_device(device, "mem_get_info")
    return int(free_and_total[1]) if free_and_total else 0


def _product(device: torch.device, dtype: torch.dtype) -> Product:
    size = 256
    # On a slow CPU the first size is large enough; a GPU takes 8192 until its time is spent on arithmetic
    while True:
        matrix = torch.ones(size, size, dtype=dtype, device=device)
        seconds = _timed(partial(torch.matmul, matrix, matrix), device)
        if seconds >= LONG_S or size >= 8192:
            return Product(dtype=str(dtype).removeprefix("torch."), size=size, flops=2 * size**3 / seconds)
        size *= 2


def _bandwidth(device: torch.device) -> float:
    size = 1 << 24
    # Larger than caches, from which a copy would be faster
    while True:
        source = torch.ones(size, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        seconds = _timed(partial(target.copy_, source), device)
        if seconds >= LONG_S or size >= 1 << 28:
            return 2 * size / seconds  # read and written
        size *= 2


def _launch(device: torch.device) -> float:
    # One number, so that the device is faster than the host that starts the operations
    small = torch.ones(1, device=device)

    def start_many() -> None:
        for _ in range(LAUNCHES):
            small.mul_(1)

    return _timed(start_many, device) / LAUNCHES


def _collectives(device: torch.device, mesh: DeviceMesh) -> Iterator[Collective]:
    names = mesh.mesh_dim_names or ()
    for name in names:
        group = mesh.get_group(name)
        ranks = dist.get_process_group_ranks(group)
        # Nothing is sent along a dimension of one rank
        if len(ranks) == 1:
            continue
        for kind, run in _KINDS.items():
            for size in SIZES:
                # Whole numbers of elements for each rank
                whole = torch.ones(size // 4 // len(ranks) * len(ranks) or len(ranks), device=device)
                part = whole[: len(whole) // len(ranks)].clone()
                # Else the slowest to arrive would be measured
                dist.barrier(group)
                seconds = _timed(partial(run, whole, part, group), device)
                per_node = _per_node(ranks)
                yield Collective(kind=kind, ranks=len(ranks), per_node=per_node, bytes=whole.nbytes, seconds=seconds)


_KINDS: dict[str, Callable[[Tensor, Tensor, dist.ProcessGroup], object]] = {
    "all-reduce": lambda whole, part, group: dist.all_reduce(whole, group=group),
    "all-gather": lambda whole, part, group: dist.all_gather_into_tensor(whole, part, group=group),
    "reduce-scatter": lambda whole, part, group: dist.reduce_scatter_tensor(part, whole, group=group),
}


def _per_node(ranks: list[int]) -> int:
    on_a_node = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    nodes = [rank // on_a_node for rank in ranks]
    return min(nodes.count(node) for node in set(nodes))


def _timed(run: Callable[[], object], device: torch.device) -> float:
    """Returns the shortest time of several calls: what the machine can do, whatever else it does."""
    run()  # the first one chooses kernels and allocates
    return min(_once(run, device) for _ in range(REPEATS))


def _once(run: Callable[[], object], device: torch.device) -> float:
    wait_for(device)
    start = time.perf_counter()
    run()
    wait_for(device)
    return max(time.perf_counter() - start, 1e-9)
