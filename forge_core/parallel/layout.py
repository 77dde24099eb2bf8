"""The layout that a job asks for on a number of ranks, and whether its batch fits it. Pure arithmetic, no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from forge_core.contracts.errors import JobError, Problem
from forge_core.contracts.layout import MESH_DIMENSIONS, Layout

if TYPE_CHECKING:
    from forge_core.config.job import Job


def plan_layout(job: Job, world_size: int) -> tuple[Layout, list[Problem]]:
    """The layout that the job's stages ask for on `world_size` ranks, and what is wrong with it.

    A dimension given as `"auto"` takes the ranks that are left. Where no stage sets `replicate` or `shard`, they go to
    `replicate`: the core then adds that stage. Otherwise left-over ranks are an error.
    """
    degrees: dict[str, int | str] = {}
    problems = list(_collect_degrees(job, degrees))
    if "auto" not in degrees.values() and not degrees.keys() & {"replicate", "shard"}:
        degrees["replicate"] = "auto"
    automatic = [name for name, degree in degrees.items() if degree == "auto"]
    fixed = {name: int(degree) for name, degree in degrees.items() if degree != "auto"}
    product = math.prod(degree for name, degree in fixed.items() if name != "ep")
    arithmetic = " x ".join(f"{name} {degree}" for name, degree in fixed.items() if name != "ep") or "1"
    if world_size % product:
        problems.append(Problem("parallel", f"{arithmetic} = {product} does not divide the {world_size} ranks"))
    elif automatic:
        fixed[automatic[0]] = world_size // product
    elif product != world_size:
        message = f"{arithmetic} = {product}, but there are {world_size} ranks; "
        problems.append(Problem("parallel", message + f'start {product}, or set replicate or shard to "auto"'))
    return (Layout(**fixed) if not problems else Layout()), problems


def _collect_degrees(job: Job, degrees: dict[str, int | str]) -> Iterator[Problem]:
    origin: dict[str, str] = {}
    for name, stage in job.parallel.items():
        for dimension, degree in stage.degrees().items():
            if dimension not in (*MESH_DIMENSIONS, "ep"):
                allowed = ", ".join((*MESH_DIMENSIONS, "ep"))
                yield Problem(f"parallel.{name}", f"no mesh dimension {dimension!r}; there are {allowed}")
            elif dimension in degrees:
                yield Problem(
                    f"parallel.{name}", f"dimension {dimension} is already set by parallel.{origin[dimension]}"
                )
            elif degree == "auto" and "auto" in degrees.values():
                yield Problem(f"parallel.{name}", f"only one dimension can be auto; parallel.{origin['auto']} is")
            else:
                degrees[dimension] = degree
                origin[dimension] = name
                if degree == "auto":
                    origin["auto"] = name


def layout_of(job: Job, world_size: int) -> Layout:
    """The layout of a job that has not been checked.

    Raises:
        JobError: no layout of `world_size` ranks fits the job, or its batch does not divide over it.
    """
    layout, problems = plan_layout(job, world_size)
    problems = problems or list(batch_problems(job, layout))
    if problems:
        raise JobError(problems)
    return layout


def batch_problems(job: Job, layout: Layout) -> Iterator[Problem]:
    """Whether the global batch divides into equal micro-batches on every data-parallel rank."""
    batch, ranks = job.train.global_batch_size, layout.data_parallel
    if batch % ranks:
        yield Problem("train.global_batch_size", f"{batch} sequences do not divide by {ranks} data-parallel ranks")
    elif batch // ranks % (job.train.micro_batch_size or 1):
        message = f"{batch // ranks} sequences a rank do not divide by micro_batch_size {job.train.micro_batch_size}"
        yield Problem("train.micro_batch_size", message)


def micro_batches(job: Job, layout: Layout) -> tuple[int, int]:
    """(number, size) of the micro-batches of one rank in one step."""
    share = job.train.global_batch_size // layout.data_parallel
    size = job.train.micro_batch_size or share
    return share // size, size
