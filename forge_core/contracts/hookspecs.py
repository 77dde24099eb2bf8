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

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import torch
    from torch import nn

    from forge_core.contracts.components import (
        DatasetComponent,
        LoggerComponent,
        LossComponent,
        ModelComponent,
        OptimizerComponent,
        ParallelComponent,
        RouterComponent,
        SchedulerComponent,
        TrainingHook,
    )
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Dataset
    from forge_core.contracts.errors import Problem
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.model import Model
    from forge_core.contracts.optimizer import NamedParameters, Schedule
    from forge_core.contracts.runtime import Logger, LossFunction, ParallelStage
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
    def forge_build_model(self, component: ModelComponent, context: BuildContext) -> Model | None:
        """Build the network on the meta device. A wrapper may replace or wrap modules; it must keep the protocols.

        Example: freeze everything but the norms.

            @hookimpl(wrapper=True)
            def forge_build_model(self):
                model = yield
                for name, parameter in model.named_parameters():
                    parameter.requires_grad_("norm" in name)
                return model
        """

    @hookspec(firstresult=True)
    def forge_build_router(
        self, component: RouterComponent, context: BuildContext, dim: int, experts: int
    ) -> nn.Module | None:
        """Build one router; called for every layer that has one.

        Example: a wrapper that returns `router.double() if context.layer < 2 else router`.
        """

    @hookspec(firstresult=True)
    def forge_build_optimizer(
        self, component: OptimizerComponent, context: BuildContext, parameters: NamedParameters
    ) -> torch.optim.Optimizer | None:
        """Build the optimizer over the materialised, sharded model.

        Example: a wrapper that prints how many parameter groups there are, and returns the optimizer it got.
        """

    @hookspec(firstresult=True)
    def forge_build_scheduler(self, component: SchedulerComponent, context: BuildContext) -> Schedule | None:
        """Build a schedule, the learning rate's or any other scalar's.

        Example: a wrapper that halves every rate: `return lambda step, total: 0.5 * schedule(step, total)`.
        """

    @hookspec(firstresult=True)
    def forge_build_loss(self, component: LossComponent, context: BuildContext) -> LossFunction | None:
        """Build the loss function.

        Example: a wrapper whose loss calls the given one and returns `output._replace(sum=2 * output.sum)`.
        """

    @hookspec(firstresult=True)
    def forge_build_dataset(self, component: DatasetComponent, context: BuildContext) -> Dataset | None:
        """Build one data source.

        Example: a wrapper that counts how often a sample is read returns its own `Dataset` around the one it got.
        """

    @hookspec(firstresult=True)
    def forge_build_parallel_stage(self, component: ParallelComponent, context: BuildContext) -> ParallelStage | None:
        """Build one parallel stage, before it is applied to the model.

        Example: a wrapper whose stage applies the given one to the text layers only.
        """

    @hookspec(firstresult=True)
    def forge_build_logger(self, component: LoggerComponent, context: BuildContext) -> Logger | None:
        """Build one logger, on rank 0.

        Example: a wrapper that drops keys of a record before it passes it on.
        """

    @hookspec
    def forge_configure_backend(self, job: Job, device: torch.device) -> Callable[[], None] | None:
        """Configure libraries of the process, such as torch's kernels, before mesh, data and model of a job are built.

        Return a function that undoes it, which is called before another job is built in the process, so that no run is
        shaped by what its own job does not name.

        Example: flush denormal numbers to zero.

            @hookimpl
            def forge_configure_backend(self, job, device):
                torch.set_flush_denormal(True)
                return lambda: torch.set_flush_denormal(False)
        """

    @hookspec
    def forge_validate_job(self, job: Job, layout: Layout) -> Iterable[Problem]:  # type: ignore[empty-body]
        """Contribute problems of the whole job; paths are full TOML paths. Called before anything is built.

        Example: insist on clipping.

            @hookimpl
            def forge_validate_job(self, job):
                if job.train.grad_clip_norm == 0:
                    yield Problem("train.grad_clip_norm", "must not be 0 with [plugins.careful]")
        """

    @hookspec
    def forge_training_hooks(self, job: Job) -> Iterable[TrainingHook]:  # type: ignore[empty-body]
        """Contribute training hooks, which run after those of the job's components and before those of `[hooks]`.

        Example: `return [AverageWeights(decay=self.decay)]`.
        """

    @hookspec
    def forge_add_hookspecs(self) -> Any:
        """Declare specifications of the plugin's own: return a class or module with methods marked `@hookspec`.

        Their names start with `forge_`; `forge_build_<kind>` takes part in `context.build`.
        """
