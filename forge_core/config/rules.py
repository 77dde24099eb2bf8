"""Rules across fields and sections: the core's own, those of components, and those of active plugins."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import attrs

from forge_core.config.mixture import loader_problems, mixture_problems
from forge_core.config.walk import walk_components
from forge_core.contracts.components import Component, OptimizerComponent, ParallelComponent
from forge_core.contracts.errors import JobError, PluginError, Problem, did_you_mean
from forge_core.contracts.layout import Layout
from forge_core.job import LOCAL_STORAGE, Checked, Job
from forge_core.parallel.layout import batch_problems, plan_layout
from forge_core.parallel.stages import order_stages
from forge_core.plugins.catalog import Catalog

READS = ("data.sources", "data.tokenizer")
"""Tables of components that read what need not be where a job is only looked at."""


def check_rules(job: Job, catalog: Catalog, world_size: int = 1, with_data: bool = True) -> list[Problem]:
    """Rules that a well-formed job breaks on `world_size` ranks; a job that breaks none is marked as `checked`.

    Args:
        with_data: whether what the job reads must exist. Without it, the job is not marked.
    """
    layout, problems = _plan(job, world_size)
    planned = not problems
    if planned:
        problems += batch_problems(job, layout)
    problems += _core_problems(job)
    problems += loader_problems(job, catalog)
    problems += _order_problems(job, catalog)
    problems += _executor_problems(job, catalog)
    problems += _load_problems(job) if with_data else ()
    for path, component in walk_components(job):
        if not with_data and path.startswith(READS):
            continue
        problems += _component_problems(path, component, job, layout, catalog)
    wrong_plugins = _plugin_problems(job, layout, catalog)
    if planned and not wrong_plugins:
        problems += [problem for problem in _model_problems(job, layout, catalog) if problem not in problems]
    problems += wrong_plugins
    if with_data and not problems:
        object.__setattr__(job, "checked", Checked(world_size, layout, catalog))  # the job is frozen; this is no key
    return problems


def _plan(job: Job, world_size: int) -> tuple[Layout, list[Problem]]:
    try:
        return plan_layout(job, world_size)
    except Exception as error:  # a stage's `degrees`
        return Layout(), [Problem("parallel", f"the layout cannot be planned: {_tell(error)}")]


def _core_problems(job: Job) -> Iterator[Problem]:
    yield from mixture_problems(job)
    owners = [name for name, stage in job.parallel.items() if stage.owns_reduction]
    for name in owners[1:]:
        message = f"both this and parallel.{owners[0]} reduce the gradients; keep one of them"
        yield Problem(f"parallel.{name}", message)
    if job.checkpoint.keep_best and not job.eval.interval:
        message = "the best checkpoints are known by evaluations during the run, and there are none; set eval.interval"
        yield Problem("checkpoint.keep_best", message)


def _order_problems(job: Job, catalog: Catalog) -> list[Problem]:
    try:
        order_stages(job.parallel, catalog)
    except JobError as error:
        return list(error.problems)
    return []


def _executor_problems(job: Job, catalog: Catalog) -> Iterator[Problem]:
    given = catalog.type_of(type(job.executor))
    if given == attrs.fields(type(job)).executor.default.type:
        return
    for name, stage in job.parallel.items():
        if stage.brings_executor:
            seen = f"{given!r} would not be used: parallel.{name} brings an executor of its own"
            yield Problem("executor", f"{seen}; leave one of them out")


def _may_hold_checkpoints(path: Path) -> bool:
    """Whether `path` is a checkpoint or the folder of a run with some; a storage other than the core's may have them
    anywhere, which shows when the run starts."""
    if (path / "manifest.json").is_file() or any(path.glob("*/step-*/manifest.json")):
        return True
    kept = tomllib.loads((path / "job.toml").read_text()) if (path / "job.toml").is_file() else {}
    return bool(kept.get("checkpoint", {}).get("storage", {}).get("type", LOCAL_STORAGE) != LOCAL_STORAGE)


def _load_problems(job: Job) -> Iterator[Problem]:
    """Only before the run begins: later it needs these weights no more, and they may be gone."""
    load = job.checkpoint.load
    if load is None or (Path(job.job.output) / job.job.name / "job.toml").exists():
        return
    path = Path(load.path)
    if not path.is_dir():
        near = did_you_mean(path.name, [sibling.name for sibling in path.parent.glob("*/")])
        yield Problem("checkpoint.load.path", f"there is no folder {load.path!r}{near}")
    elif not _may_hold_checkpoints(path):
        seen = f"{load.path!r} is neither a checkpoint (it has no manifest.json) nor a run folder with checkpoints"
        yield Problem("checkpoint.load.path", seen)


def _component_problems(path: str, component: Component, job: Job, layout: Layout, catalog: Catalog) -> list[Problem]:
    try:
        return [problem.below(path) for problem in component.problems(job, layout)]
    except Exception as error:
        who = f"{component.kind} {catalog.type_of(type(component))!r}"
        return [Problem(path, f"problems() of {who} failed: {_tell(error)}")]


def _model_problems(job: Job, layout: Layout, catalog: Catalog) -> list[Problem]:
    """Problems of stages and the optimizer with the model, which is built only if one of them looks at it."""
    bases = {*(type(stage).model_problems for stage in job.parallel.values()), type(job.optimizer).model_problems}
    asked = bases - {ParallelComponent.model_problems, OptimizerComponent.model_problems}
    if not asked and job.optimizer.further_roles is None:
        return []
    from forge_core.parallel.bare_model import fitting_problems

    return fitting_problems(job, layout, catalog)


def _plugin_problems(job: Job, layout: Layout, catalog: Catalog) -> list[Problem]:
    from forge_core.plugins.manager import Plugins

    if not job.plugins:
        return []
    try:
        plugins = Plugins(job.plugins, catalog)
    except PluginError as error:
        return [problem if problem.path else problem.below("plugins") for problem in error.problems]
    try:
        return plugins.validate_job(job, layout)
    except Exception as error:
        notes = ", ".join(getattr(error, "__notes__", ()))
        return [Problem("plugins", f"forge_validate_job failed{' ' if notes else ''}{notes}: {_tell(error)}")]


def _tell(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
