"""A run on fake tensors, which have shapes and no content, built as a real one is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import torch
from attrs import frozen

from forge_core.auxiliary import Auxiliary
from forge_core.config.keys import walk_components
from forge_core.contracts.components import TrainingHook
from forge_core.contracts.model import Initialises, Model
from forge_core.engine.build import (
    BuiltModel,
    Run,
    assemble,
    build_bare_model,
    build_context,
    build_tokenizer,
    stages_of,
)
from forge_core.engine.hooks import HookRunner
from forge_core.job import Job
from forge_core.parallel.initialise import allocate
from forge_core.parallel.stages import apply_stages
from forge_core.plugins.catalog import Catalog
from forge_core.plugins.manager import RunContext
from forge_kit.torch_internals import FakeTensorMode
from forge_plugin_plan.lines import PlayedInPlans
from forge_plugin_plan.meter import AllocationLog, MeteredLoss
from forge_plugin_plan.torch_internals import QuickFakeTensorMode

CPU = torch.device("cpu")


@frozen
class FakeRun:
    """A run, the mode in which its tensors live, and its loss."""

    run: Run
    mode: FakeTensorMode
    loss: MeteredLoss
    beside: AllocationLog
    """Memory that exists beside the model throughout the run: of what the loss has built, such as a reference."""
    hooks: Sequence[TrainingHook]
    """Those whose work before each step counts; see `forge_plugin_plan.lines.PlayedInPlans`."""


def fake_run(job: Job, catalog: Catalog, device: torch.device) -> FakeRun:
    """Build a job for this rank of the present (fake) world.

    No data are read, unless the model takes its vocabulary from the tokenizer.

    Args:
        job: the job.
        catalog: components that are installed.
        device: device that the job will run on, which need not exist. Models and losses choose their kernels by it.

    Raises:
        JobError: the job cannot be built; lists the problems of each stage.
    """
    train = attrs.evolve(job.train, device="cpu", non_finite="ignore")  # nothing can be decided by values
    job = attrs.evolve(job, train=train)
    # Modules may combine fake tensors with real ones that were made outside of the mode
    mode = QuickFakeTensorMode(allow_non_fake_inputs=True)
    context = _context(job, catalog, mode)
    # Tensors are the CPU's, so that no GPU is needed; only the choice of kernels goes by the device of the job.
    choosing = attrs.evolve(context, device=device)
    model, outline = build_bare_model(job, choosing)  # outside of the mode: within it, meshes cannot be sliced
    stages = stages_of(job, context)
    model, built = apply_stages(model, stages, context)
    with mode:
        _give_memory(model)
        with AllocationLog() as beside:
            loss = MeteredLoss(choosing.build(job.loss))
        run = assemble(job, context, BuiltModel(model, outline, stages, built), loss, (), HookRunner({}))
    return FakeRun(run, mode, loss, beside, [*_played_hooks(job, context)])


def _played_hooks(job: Job, context: RunContext) -> Iterator[TrainingHook]:
    # In the order in which a run calls them: of components, of plugins by their hook, and the ones of the job
    parts = [part for _, part in walk_components(job) if not isinstance(part, TrainingHook)]
    hooks = [hook for part in parts for hook in part.training_hooks(job)]
    for hook in [*hooks, *context.plugins.training_hooks(job), *job.hooks.values()]:
        if isinstance(hook, PlayedInPlans) and hook.played_in_plans:
            yield hook


def _context(job: Job, catalog: Catalog, mode: FakeTensorMode) -> RunContext:
    context = build_context(job, catalog, None)
    tokenizer = None if _has_vocabulary(job) else build_tokenizer(job, context)
    with mode:
        return attrs.evolve(context, auxiliary=Auxiliary(CPU), tokenizer=tokenizer)


def _has_vocabulary(job: Job) -> bool:
    """Whether the model, or a part of it, states its vocabulary, so that no tokenizer, maybe of the hub, is needed."""
    parts = (part for path, part in walk_components(job) if path == "model" or path.startswith("model."))
    return any(getattr(part, "vocab_size", 0) for part in parts)


def _give_memory(model: Model) -> None:
    """As `materialise` does, without drawing initial values."""
    allocate(model, CPU)
    for module in model.modules():
        if isinstance(module, Initialises):
            module.init_buffers(CPU)
