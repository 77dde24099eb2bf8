"""The layout that a job requests on a number of ranks, and whether its batch fits it. Pure arithmetic, no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from forge_core.contracts.errors import JobError, Problem
from forge_core.contracts.layout import DIMENSIONS, Layout, MeshDimension
from forge_core.job import Job


def plan_layout(job: Job, world_size: int) -> tuple[Layout, list[Problem]]:
    """The layout that the job's stages request on `world_size` ranks, and the problems with it.

    A dimension given as `"auto"` takes the remaining ranks. If no stage requests a dimension that divides
    samples, they go to `replicate`: the core then adds that stage. Otherwise left-over ranks are an error.
    """
    known = {dimension.name: dimension for dimension in DIMENSIONS}
    degrees: dict[str, int | str] = {}
    problems = [*_collect_dimensions(job, known), *_collect_degrees(job, known, degrees)]
    if "auto" not in degrees.values() and not any(known[name].samples for name in degrees):
        degrees["replicate"] = "auto"
    automatic = [name for name, degree in degrees.items() if degree == "auto"]
    fixed = {name: int(degree) for name, degree in degrees.items() if degree != "auto"}
    product = math.prod(fixed.values())
    arithmetic = " x ".join(f"{name} {degree}" for name, degree in fixed.items()) or "1"
    if world_size % product:
        problems.append(Problem("parallel", f"{arithmetic} = {product} does not divide the {world_size} ranks"))
    elif automatic:
        fixed[automatic[0]] = world_size // product
    elif product != world_size:
        problems.append(
            Problem(
                "parallel",
                f"{arithmetic} = {product}, but there are {world_size} ranks; "
                f'start {product}, or set replicate or shard to "auto"',
            )
        )
    run = max((stage.part_of_batch() for stage in job.parallel.values()), key=lambda part: part[1], default=(0, 1))
    return (Layout(known.values(), run=run, **fixed) if not problems else Layout()), problems


def _collect_dimensions(job: Job, known: dict[str, MeshDimension]) -> Iterator[Problem]:
    """Add the dimensions that stages declare to `known`."""
    for name, stage in job.parallel.items():
        for dimension in stage.dimensions:
            if known.setdefault(dimension.name, dimension) != dimension:
                yield Problem(
                    f"parallel.{name}", f"declares the dimension {dimension.name}, which there is already, otherwise"
                )


def _collect_degrees(job: Job, known: Mapping[str, MeshDimension], degrees: dict[str, int | str]) -> Iterator[Problem]:
    origin: dict[str, str] = {}
    for name, stage in job.parallel.items():
        for dimension, degree in stage.degrees().items():
            divided = [other for other in degrees if known[other].layers and degrees[other] != 1]
            if dimension not in known:
                yield Problem(
                    f"parallel.{name}",
                    f"no stage declares the mesh dimension {dimension!r}; declare it in `dimensions`, or take one of "
                    f"{', '.join(known)}",
                )
            elif dimension in degrees:
                yield Problem(
                    f"parallel.{name}", f"dimension {dimension} is already set by parallel.{origin[dimension]}"
                )
            elif degree == "auto" and "auto" in degrees.values():
                yield Problem(f"parallel.{name}", f"only one dimension can be auto; parallel.{origin['auto']} is")
            elif known[dimension].layers and divided and degree != 1:
                yield Problem(f"parallel.{name}", f"parallel.{origin[divided[0]]} already divides the layers")
            else:
                degrees[dimension] = degree
                origin[dimension] = name
                if degree == "auto":
                    origin["auto"] = name


def layout_of(job: Job, world_size: int) -> Layout:
    """The layout of a job that has not been checked; raises JobError if none fits, or a stage does not."""
    layout, problems = plan_layout(job, world_size)
    for name, stage in job.parallel.items() if not problems else ():
        problems += [problem.below(f"parallel.{name}") for problem in stage.problems(job, layout)]
    if problems:
        raise JobError(problems)
    return layout


def batch_problems(job: Job, layout: Layout) -> Iterator[Problem]:
    """Whether the global batch divides into equal micro-batches on every data-parallel rank."""
    train, ranks, size = job.train, layout.data_parallel * layout.run[1], job.train.micro_batch_size
    path = f"train.{'batch_schedule' if train.batch_schedule else 'global_batch_size'}"
    for batch in {*train.batch_sizes.values()}:
        if not 0 < batch <= train.global_batch_size:
            yield Problem(path, f"has {batch} sequences in a step, not 1 to {train.global_batch_size = }")
        elif batch % ranks:
            yield Problem(path, f"{batch} is not divisible by the {ranks} data-parallel ranks")
        elif batch // ranks % (size or 1):
            yield Problem(
                "train.micro_batch_size",
                f"{batch // ranks} sequences per rank are not divisible by micro_batch_size {size}",
            )


def micro_batches(job: Job, layout: Layout, batch: int = 0) -> tuple[int, int]:
    """(number, size) of a rank's micro-batches in a step of `batch` sequences, by default the largest that the job has.

    None where `batch_problems` has a problem.
    """
    share = (batch or job.train.global_batch_size) // (layout.data_parallel * layout.run[1])
    size = job.train.micro_batch_size or share or 1
    return share // size, size
