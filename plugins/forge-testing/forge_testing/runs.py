"""Runs that a test builds and steps itself, to inspect their state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from forge_core.data.loader import TrainLoader
from forge_core.engine.build import Run, build_context, build_run
from forge_core.engine.step import Stepper
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


def draw(name: str, shape: Sequence[int], step: int = 0) -> Tensor:
    """Return normally distributed float64 values, the same in every process for the same name and step."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)) + 1000 * step)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
