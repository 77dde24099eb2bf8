"""Every hook specification of the core.

A plugin (`forge_core.Plugin`) implements hooks with methods marked `@hookimpl`, and acts only in jobs that name it:

    @define(kw_only=True, slots=False)
    class Lora(Plugin):
        rank: int = 8

        @hookimpl(wrapper=True)
        def forge_build_model(self, context):
            model = yield
            return add_adapters(model, self.rank)

An implementation names only the arguments that it needs. Build hooks are `firstresult`: the first implementation that
does not return None decides, and the core's own, which comes last, calls `component.build(...)`. A wrapper
(`wrapper=True`) receives what the others built and may transform it. Training is observed through `TrainingHook`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import torch
    from torch import nn

    from forge_core.contracts import components
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Dataset
    from forge_core.contracts.errors import Problem
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.model import Model
    from forge_core.contracts.optimizer import NamedParameters, Schedule
    from forge_core.contracts.runtime import Executor, Logger, LossFunction, ParallelStage, Storage
    from forge_core.job import Job

PROJECT = "forge"
hookspec = pluggy.HookspecMarker(PROJECT)
"""Marks a specification; to deprecate it: `warn_on_impl=deprecated(…)`, `warn_on_impl_args={name: …}`."""
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a method of a `Plugin` as the implementation of the hook of that name."""


# Few hooks, and none in the step: build hooks cost nothing while a run trains, and what trains stays readable in one
# place. Arguments may be added in later versions, never renamed or removed without a deprecation.
class ForgeHooks:
    """The specifications."""

    @hookspec(firstresult=True)
    def forge_build_model(self, component: components.ModelComponent, context: BuildContext) -> Model | None:
        """Build the network on the meta device. A wrapper may replace or wrap modules; it must keep the protocols."""

    @hookspec(firstresult=True)
    def forge_build_router(
        self, component: components.Component, context: BuildContext, dim: int, experts: int
    ) -> nn.Module | None:
        """Build one router; called for every layer that has one, whose number is `context.layer`."""

    @hookspec(firstresult=True)
    def forge_build_optimizer(
        self, component: components.OptimizerComponent, context: BuildContext, parameters: NamedParameters
    ) -> torch.optim.Optimizer | None:
        """Build the optimizer over the materialised, sharded model.

        A wrapper that multiplies settings of a group states by what in its key `factors`, as in `{"lr": 0.25}`: the
        engine multiplies what `[[optimizer.groups]]` sets for its parameters, too.
        """

    @hookspec(firstresult=True)
    def forge_build_scheduler(self, component: components.SchedulerComponent, context: BuildContext) -> Schedule | None:
        """Build a schedule, the learning rate's or any other scalar's.

        A wrapper that halves every rate returns `lambda step, total: 0.5 * schedule(step, total)`.
        """

    @hookspec(firstresult=True)
    def forge_build_loss(self, component: components.LossComponent, context: BuildContext) -> LossFunction | None:
        """Build the loss function; a wrapper's loss calls the given one and returns `output._replace(sum=…)`."""

    @hookspec(firstresult=True)
    def forge_build_dataset(self, component: components.DatasetComponent, context: BuildContext) -> Dataset | None:
        """Build one data source; a wrapper may return its own `Dataset` around the given one."""

    @hookspec(firstresult=True)
    def forge_build_parallel_stage(
        self, component: components.ParallelComponent, context: BuildContext
    ) -> ParallelStage | None:
        """Build one parallel stage, before it is applied to the model."""

    @hookspec(firstresult=True)
    def forge_build_executor(
        self,
        component: components.ExecutorComponent,
        context: BuildContext,
        model: Model,
        loss: LossFunction,
        stages: Sequence[ParallelStage],
    ) -> Executor | None:
        """Build the executor over the model after all stages. One that a stage brings passes through here, too."""

    @hookspec(firstresult=True)
    def forge_build_storage(self, component: components.StorageComponent, context: BuildContext) -> Storage | None:
        """Build the storage of checkpoints, for the run and for commands that read it; a wrapper may count bytes."""

    @hookspec(firstresult=True)
    def forge_build_logger(self, component: components.LoggerComponent, context: BuildContext) -> Logger | None:
        """Build one logger, on rank 0; a wrapper may drop keys of a record before it passes it on."""

    @hookspec
    def forge_configure_backend(self, job: Job, device: torch.device) -> Callable[[], None] | None:
        """Configure libraries of the process, such as torch's kernels, before mesh, data and model of a job are built.

        Return a function that undoes it, such as `lambda: torch.set_flush_denormal(False)`. It is called before another
        job is built in the process, so that no run is shaped by what its own job does not name.
        """

    @hookspec
    def forge_validate_job(self, job: Job, layout: Layout) -> Iterable[Problem]:  # type: ignore[empty-body]
        """Contribute problems of the whole job; paths are full TOML paths. Called before anything is built.

        A plugin that requires clipping yields `Problem("train.grad_clip_norm", "must not be 0")` where it is 0.
        """

    @hookspec
    def forge_training_hooks(self, job: Job) -> Iterable[components.TrainingHook]:  # type: ignore[empty-body]
        """Contribute training hooks, which run after the hooks of the job's components and before `[hooks]`."""

    @hookspec
    def forge_add_hookspecs(self) -> Any:
        """Return a class or module with methods `forge_…` marked `@hookspec`; `forge_build_<kind>` is for that kind."""
