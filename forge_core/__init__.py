"""Forge: a plugin-based training engine for foundation models in PyTorch.

    from forge_core import Trainer, load_job

    Trainer(load_job("job.toml")).run()

Importing this package costs next to nothing: every public name is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from forge_core.moved import install

if TYPE_CHECKING:
    from forge_core.config.dump import dump_job
    from forge_core.config.load import load_job
    from forge_core.contracts.components import (
        Component,
        DatasetComponent,
        EvaluationComponent,
        ExecutorComponent,
        LoaderComponent,
        LoggerComponent,
        LossComponent,
        ModelComponent,
        OptimizerComponent,
        PackingComponent,
        ParallelComponent,
        Plugin,
        RouterComponent,
        SchedulerComponent,
        StorageComponent,
        TokenizerComponent,
        TrainingHook,
        default_type,
        when_resumed,
    )
    from forge_core.contracts.deprecation import ForgeDeprecation, deprecated, deprecated_key
    from forge_core.contracts.errors import CheckpointError, ForgeError, JobError, PluginError, Problem
    from forge_core.contracts.hookspecs import hookimpl, hookspec
    from forge_core.engine.trainer import Trainer
    from forge_core.job import Job
    from forge_core.launch.progress_beacon import report_progress
    from forge_core.plugins.catalog import Catalog

    __version__: str

_COMPONENTS = "forge_core.contracts.components"
_HOMES = {
    "Catalog": "forge_core.plugins.catalog",
    "CheckpointError": "forge_core.contracts.errors",
    "ForgeDeprecation": "forge_core.contracts.deprecation",
    "ForgeError": "forge_core.contracts.errors",
    "Job": "forge_core.job",
    "JobError": "forge_core.contracts.errors",
    "PluginError": "forge_core.contracts.errors",
    "Problem": "forge_core.contracts.errors",
    "Trainer": "forge_core.engine.trainer",
    "deprecated": "forge_core.contracts.deprecation",
    "deprecated_key": "forge_core.contracts.deprecation",
    "dump_job": "forge_core.config.dump",
    "hookimpl": "forge_core.contracts.hookspecs",
    "hookspec": "forge_core.contracts.hookspecs",
    "load_job": "forge_core.config.load",
    "report_progress": "forge_core.launch.progress_beacon",
}
"""Where each public name is defined; those that are not listed, in `forge_core.contracts.components`."""

__all__ = [
    "Catalog",
    "CheckpointError",
    "Component",
    "DatasetComponent",
    "EvaluationComponent",
    "ExecutorComponent",
    "ForgeDeprecation",
    "ForgeError",
    "Job",
    "JobError",
    "LoaderComponent",
    "LoggerComponent",
    "LossComponent",
    "ModelComponent",
    "OptimizerComponent",
    "PackingComponent",
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
    "default_type",
    "deprecated",
    "deprecated_key",
    "dump_job",
    "hookimpl",
    "hookspec",
    "load_job",
    "report_progress",
    "when_resumed",
]

install()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "__version__":
        from forge_core.plugins.catalog import core_version

        return core_version()
    return getattr(import_module(_HOMES.get(name, _COMPONENTS)), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
