"""Runs that a test builds and steps itself, to inspect their state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from forge_core.data.loader import TrainLoader
from forge_core.engine.build import Run, build_context, build_run
from forge_core.engine.step import Stepper
from forge_core.parallel.mesh import gather_objects, local_part, world_size
from forge_kit.optim.whole_matrices import own_box
from forge_testing.catalogs import installed
from forge_testing.tiny import tiny_job


def tiny_run(folder: Path | str, **changes: Any) -> Run:
    """Build the run of a `tiny_job` with these changes, with everything installed. Collective."""
    catalog = installed()
    job = tiny_job(str(folder), catalog, **changes)
    return build_run(job, build_context(job, catalog, None))


def advance(run: Run, steps: int) -> None:
    """Make the first `steps` steps of a run, each with an update. Collective."""
    stepper, loader = Stepper(run), TrainLoader(run.job, run.datasets, run.context)
    for step in range(steps):
        _, sums = stepper.gradients(loader.next_step(), step)
        decided: Any = SimpleNamespace(grad_norm=stepper.norm(), requests=SimpleNamespace(skip=""))
        stepper.update(decided, sums["loss_sum"])
    loader.close()


def whole(tensor: Tensor) -> Tensor:
    """Return a copy of the full tensor. Collective for a DTensor."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def whole_tensors(tensors: Mapping[str, Tensor], mesh: DeviceMesh | None) -> dict[str, Tensor]:
    """Return the full tensors of all ranks by name, pipeline stages included, on every rank. Collective.

    Values on which ranks disagree become infinite. Types of one byte and integers have no such value, so that these
    tensors are returned in float64.
    """
    if world_size() == 1:
        local = {name: local_part(tensor).detach() for name, tensor in tensors.items()}
        return {name: tensor.to(_with_infinity(tensor.dtype), copy=True) for name, tensor in local.items()}
    # One message for all tensors: `full_tensor` of each one takes most of the time of such a short run.
    boxes = [
        (name, tensor.shape, _with_infinity(tensor.dtype), own_box(tensor, mesh)) for name, tensor in tensors.items()
    ]
    parts = [local_part(tensor).detach().reshape(-1).to("cpu", torch.float64) for tensor in tensors.values()]
    joined: dict[str, Tensor] = {}
    for described, values in gather_objects((boxes, torch.cat(parts) if parts else torch.empty(0))):
        start = 0
        for name, shape, dtype, box in described:
            target = joined.setdefault(name, torch.full(shape, torch.nan, dtype=dtype))[box]
            part = values[start : start + target.numel()].view(target.shape).to(dtype)
            equal = target.isnan() | (target == part)
            target.copy_(part.where(equal, torch.inf))
            start += target.numel()
    return joined


def _with_infinity(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_floating_point and dtype.itemsize > 1 else torch.float64


def draw(name: str, shape: Sequence[int], step: int = 0) -> Tensor:
    """Return normally distributed float64 values, the same in every process for the same name and step."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)) + 1000 * step)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
