"""Rules across fields and sections: from the core itself, from components, and from active plugins."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from forge_core.config.keys import walk_components
from forge_core.config.mixture import mixture_problems
from forge_core.contracts.components import Component, OptimizerComponent, PackingComponent, ParallelComponent
from forge_core.contracts.errors import JobError, PluginError, Problem
from forge_core.contracts.layout import Layout
from forge_core.files import existing_part
from forge_core.job import RUN_FILES, WORKER_LOADER, Checked, Job
from forge_core.parallel.layout import batch_problems, plan_layout
from forge_core.parallel.stages import order_stages
from forge_core.plugins.catalog import Catalog

READS = ("data.sources", "data.tokenizer", "checkpoint.load")
"""Tables of components that read files, which need not exist where a job is only looked at."""


def check_rules(job: Job, catalog: Catalog, world_size: int = 1, with_data: bool = True) -> list[Problem]:
    """Rules that a complete job breaks on `world_size` ranks; a job that breaks none is marked as `checked`.

    Without `with_data`, the files that the job reads need not exist, and the job is not marked.
    """
    layout, problems = _plan(job, world_size)
    planned = not problems
    problems += batch_problems(job, layout) if planned else ()
    problems += [*mixture_problems(job), *_core_problems(job, catalog)]
    problems += _output_problems(job) if with_data else ()
    for path, component in walk_components(job):
        if with_data or not path.startswith(READS):
            problems += _component_problems(path, component, job, layout, catalog)
    wrong_plugins = _plugin_problems(job, layout, catalog)
    # Last: it may build the model, for which its tables must be right, the layout planned and the plugins activated.
    if (
        planned
        and not wrong_plugins
        and not any(problem.path.startswith(("model", "train.device")) for problem in problems)
    ):
        problems += [problem for problem in _model_problems(job, layout, catalog) if problem not in problems]
    problems += wrong_plugins
    if with_data and not problems:
        object.__setattr__(job, "checked", Checked(world_size, layout, catalog))  # the job is frozen; this is no key
    return problems


def _plan(job: Job, world_size: int) -> tuple[Layout, list[Problem]]:
    try:
        return plan_layout(job, world_size)
    except Exception as error:  # a stage's `degrees`
        return Layout(), [Problem("parallel", f"the layout cannot be planned: {_named(error)}")]


def _core_problems(job: Job, catalog: Catalog) -> Iterator[Problem]:
    if job.train.device not in ("auto", "cpu", "cuda"):  # which every torch has, so that it need not be imported
        from forge_core.devices import device_problem

        if problem := device_problem(job.train.device):
            yield Problem("train.device", f'is "{job.train.device}": {problem}')
    owners = [name for name, stage in job.parallel.items() if stage.owns_reduction]
    for name in owners[1:]:
        yield Problem(f"parallel.{name}", f"both this and parallel.{owners[0]} reduce the gradients; keep one of them")
    if job.checkpoint.keep_best and not job.eval.interval:
        yield Problem(
            "checkpoint.keep_best",
            "the best checkpoints are known by evaluations during the run, and there are none; set eval.interval",
        )
    executor = catalog.type_of(type(job.executor))
    if executor != attrs.fields(type(job)).executor.default.type:
        for name, stage in job.parallel.items():
            if stage.brings_executor:
                would = f"{executor!r} would not be used: parallel.{name} brings its own executor"
                yield Problem("executor", f"{would}; remove one of the two")
    try:
        order_stages(job.parallel, catalog)
    except JobError as error:
        yield from error.problems
    if job.data.loader is None and job.data.workers:  # one that the job names has been looked up before
        try:
            catalog.load("loader", WORKER_LOADER)
        except PluginError as error:
            reason = "; ".join(problem.message for problem in error.problems)
            yield Problem("data.workers", f"workers need the loader {WORKER_LOADER!r}: {reason}")


def _output_problems(job: Job) -> Iterator[Problem]:
    """Whether the run folder can be made or is a run's, as is known before torch is imported and data read."""
    folder = Path(job.job.output) / job.job.name
    if not (folder / RUN_FILES[0]).exists():
        for path in filter(os.path.exists, map(folder.joinpath, RUN_FILES)):
            yield Problem("job.name", f"{path} is of no run, and would be replaced; move it, or name the run otherwise")
    existing = existing_part(folder)
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):  # not even by root, if it is read-only
        what = "cannot be written" if existing.is_dir() else "is a file"
        yield Problem("job.output", f"{str(existing)!r} {what}; name a folder that can hold run folders")


# --- rules of components and plugins: that one fails is a problem like any other ---------------------------------


def _component_problems(path: str, component: Component, job: Job, layout: Layout, catalog: Catalog) -> list[Problem]:
    try:
        return [problem.below(path) for problem in component.problems(job, layout)]
    except Exception as error:
        name = f"{component.kind} {catalog.type_of(type(component))!r}"
        return [Problem(path, f"problems() of {name} failed: {_named(error)}")]


def _model_problems(job: Job, layout: Layout, catalog: Catalog) -> list[Problem]:
    """Problems with the model, which is built only if the model, a stage, the optimizer or a plugin requires it."""
    asking: list[Any] = [*job.parallel.values(), job.optimizer, job.data.packing]
    bases = (ParallelComponent, OptimizerComponent, PackingComponent)
    asked = {type(part).model_problems for part in asking}.difference(base.model_problems for base in bases)
    changed = any("forge_build_model" in dir(plugin) for plugin in job.plugins.values())
    if not (asked or changed or job.model.built_to_check or job.optimizer.further_roles is not None):
        return []
    from forge_core.parallel.initialise import fitting_problems  # late: imports torch

    return fitting_problems(job, layout, catalog)


def _plugin_problems(job: Job, layout: Layout, catalog: Catalog) -> list[Problem]:
    if not job.plugins:
        return []
    from forge_core.plugins.manager import Plugins  # late: imports pluggy

    try:
        plugins = Plugins(job.plugins, catalog)
    except PluginError as error:
        return [problem if problem.path else problem.below("plugins") for problem in error.problems]
    try:
        return plugins.validate_job(job, layout)
    except Exception as error:
        notes = ", ".join(getattr(error, "__notes__", ()))
        return [Problem("plugins", f"forge_validate_job failed{' ' if notes else ''}{notes}: {_named(error)}")]


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
