"""Forge: a plugin-based training engine for foundation models in PyTorch.

    from forge_core import Trainer, load_job

    Trainer(load_job("job.toml")).run()

Importing this package costs next to nothing: every public name is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge_core.components import (
        Component,
        DatasetComponent,
        EvaluationComponent,
        ExecutorComponent,
        LoggerComponent,
        LossComponent,
        ModelComponent,
        OptimizerComponent,
        ParallelComponent,
        Plugin,
        RouterComponent,
        SchedulerComponent,
        StorageComponent,
        TokenizerComponent,
        TrainingHook,
        default_type,
    )
    from forge_core.config.dump import dump_job
    from forge_core.config.job import Job
    from forge_core.config.load import complete_job, load_job
    from forge_core.engine.trainer import Trainer
    from forge_core.errors import ForgeError, JobError, PluginError, Problem
    from forge_core.hookspecs import hookimpl, hookspec
    from forge_core.plugins.catalog import Catalog

    __version__: str

_MODULES = {
    "forge_core.components": (
        "Component",
        "DatasetComponent",
        "EvaluationComponent",
        "ExecutorComponent",
        "LoggerComponent",
        "LossComponent",
        "ModelComponent",
        "OptimizerComponent",
        "ParallelComponent",
        "Plugin",
        "RouterComponent",
        "SchedulerComponent",
        "StorageComponent",
        "TokenizerComponent",
        "TrainingHook",
        "default_type",
    ),
    "forge_core.config.dump": ("dump_job",),
    "forge_core.config.job": ("Job",),
    "forge_core.config.load": ("complete_job", "load_job"),
    "forge_core.engine.trainer": ("Trainer",),
    "forge_core.errors": ("ForgeError", "JobError", "PluginError", "Problem"),
    "forge_core.hookspecs": ("hookimpl", "hookspec"),
    "forge_core.plugins.catalog": ("Catalog",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Catalog",
    "Component",
    "DatasetComponent",
    "EvaluationComponent",
    "ExecutorComponent",
    "ForgeError",
    "Job",
    "JobError",
    "LoggerComponent",
    "LossComponent",
    "ModelComponent",
    "OptimizerComponent",
    "ParallelComponent",
    "Plugin",
    "PluginError",
    "Problem",
    "RouterComponent",
    "SchedulerComponent",
    "StorageComponent",
    "TokenizerComponent",
    "Trainer",
    "TrainingHook",
    "__version__",
    "complete_job",
    "default_type",
    "dump_job",
    "hookimpl",
    "hookspec",
    "load_job",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from forge_core.plugins.catalog import core_version

        value: Any = core_version()
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
