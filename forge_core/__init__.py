"""Forge: a plugin-based training engine for foundation models in PyTorch.

    from forge_core import Trainer, load_model

    folder = Trainer("job.toml").run().folder
    load_model(folder).generate("This package")

Importing this package costs next to nothing: every public name is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge_core.config.load import dump_job, load_job
    from forge_core.contracts.components import (
        Component,
        DatasetComponent,
        Environment,
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
    load_model: Any  # these two are forge-kit's, which the core does not import; `forge_kit` has their types
    read_metrics: Any

_HOMES = {
    "forge_core.config.load": ["dump_job", "load_job"],
    "forge_core.contracts.deprecation": ["ForgeDeprecation", "deprecated", "deprecated_key"],
    "forge_core.contracts.errors": ["CheckpointError", "ForgeError", "JobError", "PluginError", "Problem"],
    "forge_core.contracts.hookspecs": ["hookimpl", "hookspec"],
    "forge_core.engine.trainer": ["Trainer"],
    "forge_core.job": ["Job"],
    "forge_core.launch.progress_beacon": ["report_progress"],
    "forge_core.plugins.catalog": ["Catalog"],
    "forge_kit.tools.metrics": ["read_metrics"],
    "forge_kit.tools.trained_model": ["load_model"],
}
"""Public names by the module that defines them; all others are of `forge_core.contracts.components`."""

__all__ = [
    "Catalog",
    "CheckpointError",
    "Component",
    "DatasetComponent",
    "Environment",
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
    "load_model",
    "read_metrics",
    "report_progress",
    "when_resumed",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "__version__":
        from forge_core.plugins.catalog import core_version

        return core_version()
    # One module and not all: `Trainer` imports torch, which takes seconds, and a component's file needs only its base.
    home = next((module for module, names in _HOMES.items() if name in names), "forge_core.contracts.components")
    try:
        return getattr(import_module(home), name)
    except ModuleNotFoundError as error:
        if error.name != home.partition(".")[0]:  # something that the module itself imports is missing
            raise
        raise ModuleNotFoundError(
            f"forge_core.{name} is in {home}: pip install {error.name.replace('_', '-')}", name=error.name
        ) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
