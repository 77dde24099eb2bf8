"""The process group of a run, the mesh of its ranks, and reductions over them."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from forge_core.contracts.components import Environment
from forge_core.contracts.errors import JobError
from forge_core.contracts.layout import Layout, MeshDimension
from forge_core.devices import device_problem
from forge_core.job import LaunchSection
from forge_core.launch.rank_process import this_process
from forge_core.launch.rendezvous import Rendezvous
from forge_core.launch.world import join_world


def world_size() -> int:
    """Number of ranks of this run, from the launcher's environment."""
    return dist.get_world_size() if dist.is_initialized() else join_world().size


def global_rank() -> int:
    """This process's rank, from the launcher's environment."""
    return dist.get_rank() if dist.is_initialized() else join_world().rank


def choose_device(name: str) -> torch.device:
    """This rank's device. With fewer accelerators than ranks, `auto` is the CPU for all, and a name raises JobError."""
    # NCCL refuses two ranks on one GPU, and devices of two kinds could not be in one mesh, so it is all ranks or none.
    found = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    wanted = found.type if name == "auto" else name
    if wanted == "cpu":
        return torch.device(wanted)
    if problem := device_problem(wanted) if wanted == found.type else f"what torch finds here is {found.type}":
        raise JobError.at("train.device", f'is "{name}": {problem}')
    count = torch.accelerator.device_count()
    ranks = 1 if Environment.OWN_DEVICES in os.environ else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if ranks <= count:
        return torch.device(wanted, int(os.environ.get("LOCAL_RANK", "0")) % count)
    counts = f"{ranks} ranks on this machine and {count} of {wanted}, which ranks cannot share"
    if name != "auto":
        raise JobError.at("train.device", f'is "{name}", but there are {counts}; start {count}, or set it to "cpu"')
    if global_rank() == 0:
        warnings.warn(f"there are {counts}: training on the CPU, with gloo; start {count} to use it", stacklevel=2)
    return torch.device("cpu")


def join_ranks(launch: LaunchSection) -> Rendezvous | None:
    """The connection to the other ranks of this run. None: a process alone, or in a process group of somebody else."""
    if dist.is_initialized() or (world := join_world()).alone:
        return None
    return this_process.join(world, launch.start_timeout_s, launch.hang_timeout_s, launch.silence_timeout_s)


def make_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """Start the process group if there is none, and arrange its ranks by `layout`. A world of one is a mesh too."""
    # So code has one path, and what works on one process was not another program.
    if not dist.is_initialized():
        # Two backends: metrics, checkpoints and requests are sent from the CPU, without a wait for the GPU.
        own = dist.get_default_backend_for_device(device)
        backend = "gloo" if own == "gloo" else f"cpu:gloo,{device.type}:{own}"
        rendezvous = this_process.rendezvous
        rank, size = (rendezvous.world.rank, rendezvous.world.size) if rendezvous else (0, 1)
        store = rendezvous.group_store() if rendezvous else dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=group_timeout())
    mesh = mesh_of(layout.degrees, device.type)
    mesh.forge_layout = layout  # type: ignore[attr-defined]
    return mesh


def mesh_of(sizes: Mapping[str, int], device_type: str) -> DeviceMesh:
    """All ranks of the run, row by row, in a mesh of these dimensions, outermost first. Collective."""
    ranks = torch.arange(math.prod(sizes.values())).view(*sizes.values())
    mesh = DeviceMesh(device_type, ranks, mesh_dim_names=tuple(sizes))
    # The groups of a mesh have torch's default limit, 10 minutes with NCCL, whatever the group of all ranks has.
    if (limit := group_timeout()) is not None:
        for group in mesh.get_all_groups():
            # Public from torch 2.15 on, where the other one warns
            (getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout)(limit, group)
    return mesh


def group_timeout() -> timedelta | None:
    """The limit of this run's process groups; None: torch's own, where no watchdog runs."""
    if this_process.rendezvous is None:
        return None
    # A day after the watchdog, which sees whether any rank still moves, as in a long save on rank 0. A collective only
    # measures its own waiting time, and its limit is for the case that no watchdog can run.
    limit_s = this_process.rendezvous.hang_timeout_s
    return timedelta(seconds=limit_s, days=1 if limit_s else 365)


def leave_group() -> None:
    """End the process group, at the end of a process that ends well."""
    # Not after a failure: it waits for the other ranks, which may be gone.
    this_process.finish()
    if dist.is_initialized():
        dist.destroy_process_group()
    this_process.leave()


def sample_rank(mesh: DeviceMesh | None, layout: Layout) -> int:
    """This rank's number among those that read different sequences."""
    return _rank_along([d.name for d, _ in layout.sizes if d.samples], mesh, layout)


def part_of_step(mesh: DeviceMesh | None, layout: Layout) -> int:
    """This rank's number among those that compute different tokens or different layers."""
    return _rank_along([d.name for d, _ in layout.sizes if d.divides_tokens or d.layers], mesh, layout)


# Collectives below take groups from the whole mesh: slicing one builds a new mesh, by several device operations a step.
def _rank_along(dimensions: Sequence[str], mesh: DeviceMesh | None, layout: Layout) -> int:
    number = 0
    for name in dimensions:
        number = number * layout.degree(name) + (mesh.get_local_rank(name) if mesh is not None else 0)
    return number


def all_reduce_tokens(tensor: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Sum in place over the ranks that hold different tokens; the identity in a world of one."""
    return _all_reduce(tensor, _groups(mesh, lambda dimension: dimension.divides_tokens))


def all_reduce_samples(tensor: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Sum in place over the ranks that hold different sequences; the identity in a world of one."""
    return _all_reduce(tensor, _groups(mesh, lambda dimension: dimension.samples))


def pipeline_group(mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """The group of ranks that hold different layers, or None where each holds all."""
    return next(iter(_groups(mesh, lambda dimension: dimension.layers)), None)


def _all_reduce(tensor: Tensor, groups: Iterable[dist.ProcessGroup]) -> Tensor:
    for group in groups:
        dist.all_reduce(tensor, group=group)
    return tensor


def _groups(mesh: DeviceMesh | None, wanted: Callable[[MeshDimension], bool]) -> list[dist.ProcessGroup]:
    """This rank's groups along the dimensions that are wanted and have more than one rank, outermost first."""
    if mesh is None:
        return []
    known = dimensions_of(mesh)
    sizes = zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)
    return [mesh.get_group(name) for name, size in sizes if size > 1 and name in known and wanted(known[name])]


def dimensions_of(mesh: DeviceMesh) -> Mapping[str, MeshDimension]:
    """Its dimensions as the stages of its job declare them; of a mesh that no job made, the usual ones."""
    layout: Layout = vars(mesh).get("forge_layout", Layout())
    return {dimension.name: dimension for dimension, _ in layout.sizes}


def local_part(tensor: Any) -> Tensor:
    """This rank's part of a tensor that is split over ranks; any other tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


RING_UP_TO = 64
"""Ranks with which gloo's ring, 2 (n - 1) messages one after the other, is still faster than dissemination."""


def any_rank(flags: Sequence[bool]) -> list[bool]:
    """Whether any rank of the run has each flag set. Collective."""
    return list(map(bool, largest(flags)))


def largest(values: Sequence[float]) -> list[float]:
    """The largest of each value over the ranks of the run. Collective, and part of every step."""
    known = torch.tensor(values, dtype=torch.float64)  # on the CPU: the host must not wait for the device
    if dist.get_world_size() > RING_UP_TO:
        known = _disseminate(known)
    else:
        dist.all_reduce(known, op=dist.ReduceOp.MAX)
    return known.tolist()


def _disseminate(known: Tensor) -> Tensor:
    """Maximum of all ranks' values in log2(n) rounds (dissemination, Hensgen et al. 1988)."""
    # In round k a rank sends its values to the rank 2^k further on. A value may arrive twice, which changes nothing
    # in a maximum, so n need not be a power of two.
    rank, size, distance = dist.get_rank(), dist.get_world_size(), 1
    received = torch.empty_like(known)
    while distance < size:
        sending: Any = dist.isend(known, (rank + distance) % size)
        dist.recv(received, (rank - distance) % size)
        sending.wait()
        known, distance = torch.maximum(known, received), 2 * distance
    return known


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The value of every rank of the group (by default of the run), in order; picklable. Collective."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group)
    return gathered


BUCKET = 25 * 2**20
"""Elements a reduction takes at most: large enough for bandwidth, small enough to bound the copy."""


def sum_gradients(parameters: Iterable[nn.Parameter], reduce: Callable[[Tensor], object]) -> None:
    """Sum, in place, the gradients of parameters that train; of sharded ones, this rank's part.

    Every rank of the reduction passes the same parameters in the same order. `reduce` sums a flat tensor of many
    gradients over ranks, in place.
    """
    for bucket in _buckets([parameter for parameter in parameters if parameter.requires_grad]):
        for parameter in bucket:
            # None here, but another rank may have one, and every rank must take part in the same collectives.
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        gradients = [local_part(parameter.grad) for parameter in bucket]
        # bfloat16 gradients are summed in float32: the sum over ranks must not depend on how many there are.
        dtype = torch.promote_types(bucket[0].dtype, torch.float32)
        flat = torch.cat([gradient.reshape(-1).to(dtype) for gradient in gradients])
        reduce(flat)
        parts = flat.split([gradient.numel() for gradient in gradients])
        torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)])


def _buckets(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    buckets: list[list[nn.Parameter]] = []
    size, dtype = BUCKET, None
    for parameter in parameters:
        if size + parameter.numel() > BUCKET or parameter.dtype != dtype:
            buckets.append([])
            size, dtype = 0, parameter.dtype
        buckets[-1].append(parameter)
        size += parameter.numel()
    return buckets
