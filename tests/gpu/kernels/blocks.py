"""The blocks of the table, as recipes build them and the stage `compile` compiles them, on tensors without content."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import torch
import torch._dynamo
from attrs import define, frozen
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import DataDependentOutputException

from forge_core.auxiliary import Auxiliary
from forge_core.config.load import load_job
from forge_core.contracts.layout import Layout
from forge_core.contracts.model import Initialises
from forge_core.engine.build import BuiltModel, Run, assemble, build_bare_model, build_context, stages_of
from forge_core.engine.hooks import HookRunner
from forge_core.engine.step import Stepper
from forge_core.job import Job
from forge_core.parallel.initialise import allocate
from forge_core.parallel.layout import micro_batches
from forge_core.parallel.stages import apply_stages
from forge_core.plugins.catalog import Catalog
from forge_core.plugins.manager import RunContext
from forge_kit.nn.batches import zero_batch
from forge_kit.nn.blocks import blocks_of
from forge_kit.torch_internals import FakeTensorMode, TorchDispatchMode
from forge_plugin_compile import Compile
from forge_plugin_plan.fake_world import BroadcastLog, fake_world
from forge_plugin_plan.meter import WITHOUT_KERNEL
from gpu.kernels.lowering import BACKEND, Lowering

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
KEPT = ("activation_checkpointing",)
"""Stages of a recipe that change what a block computes on one rank; others are left out."""


@frozen
class Recipe:
    """A shipped job, shortened to one layer of each kind."""

    files: str
    """Of `configs/`, each laid over those before it."""
    changes: Mapping[str, object]
    optimizer: bool = False
    """Whether the update is counted, too."""


RECIPES: Mapping[str, Recipe] = {
    "dense": Recipe("llama-8b-4gpu.toml", {"model.layers": 1}),
    "windows": Recipe("llama-8b-4gpu.toml", {"model.layers": 1, "model.attention.window": 1024}),
    "experts": Recipe("qwen3-30b-a3b-64gpu.toml", {"model.layers": 1, "parallel.ep.degree": 1}),
    "latent": Recipe(
        "deepseek-v3-1024gpu.toml",
        {"model.layers": 1, "model.ffn.first_dense": 0, "parallel.pp.degree": 1}
        | {"parallel.ep.degree": 1, "parallel.ep.ranks_per_node": 0},
    ),
    "tower": Recipe("vlm-2b.toml vlm-stages.toml", {"model.language.layers": 1, "model.vision.encoder.layers": 1}),
    "mot": Recipe("mot-37m.toml", {"model.language.layers": 1, "model.vision.encoder.layers": 1}),
    "muon": Recipe("speedrun.toml", {"model.layers": 1, "model.vocab_size": 4096}, optimizer=True),
}


@define
class Played:
    """What one step of a recipe compiles and launches."""

    lowering: Lowering
    breaks: Mapping[str, int]
    eager: Mapping[str, Counter[str]]
    """Operations that run uncompiled: of the loss, and of the optimizer's update."""


class _Operations(TorchDispatchMode):
    """Counts operations that launch a kernel: all that are no views and ask nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not (func.is_view or func.namespace in ("prim", "profiler") or name in WITHOUT_KERNEL):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def play(recipe: Recipe) -> Played:
    """Run a step of a recipe on fake tensors of the device that there is in name; see `named_cuda.as_gpu`."""
    torch._dynamo.reset()
    counters.clear()
    lowering, operations = Lowering(), {"loss": _Operations(), "optimizer": _Operations()}
    failure: dict[str, int] = {}
    catalog = Catalog.installed()
    job = job_of(recipe, catalog)
    world = fake_world(1, 0, BroadcastLog(), pipelined=False)  # a CPU-only torch has no NCCL
    with world, lowering.active(), ExitStack() as stack:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        context = build_context(job, catalog, None)
        with mode:
            context = attrs.evolve(context, auxiliary=Auxiliary(context.device))
        built = _build(job, context, lowering)  # outside of the mode: within it, meshes cannot be sliced
        stack.enter_context(mode)
        run = _assemble(job, context, built, operations["loss"])
        stepper = Stepper(run)
        device = run.context.device
        try:
            stepper.gradients([zero_batch(job, job.train.global_batch_size, device)], step=0)
            if recipe.optimizer:
                with operations["optimizer"]:
                    run.optimizer.step()
        except DataDependentOutputException as error:
            # After a graph break, what was not compiled runs on tensors without values
            failure[f"the step ends where the host reads a value: {error.func}"] = 1
    counts = {name: each.counts for name, each in operations.items() if each.counts}
    return Played(lowering, lowering.breaks() | failure, counts)


def job_of(recipe: Recipe, catalog: Catalog) -> Job:
    """Returns the shortened job, of one micro-batch a step, on one rank, with blocks that are compiled."""
    files = [CONFIGS / name for name in recipe.files.split()]
    job = load_job(*files, overrides=dict(recipe.changes), catalog=catalog, world_size=1, with_data=False)
    stages = {name: stage for name, stage in job.parallel.items() if name in KEPT}
    # Without `fullgraph`, what does not fit into a graph is counted in place of an error
    compiled = Compile(backend=BACKEND, fullgraph=False)
    rows = micro_batches(job, Layout())[1]
    train = attrs.evolve(job.train, device="cuda", global_batch_size=rows, non_finite="ignore")
    return attrs.evolve(job, train=train, parallel={**stages, "compile": compiled}, hooks={})


def _build(job: Job, context: RunContext, lowering: Lowering) -> BuiltModel:
    model, outline = build_bare_model(job, context)
    stages = stages_of(job, context)
    model, built = apply_stages(model, stages, context)
    names = {id(module): name for name, module in model.named_modules()}
    for block in blocks_of(model):
        _announce(block, names[id(block)], lowering)
    return BuiltModel(model, outline, stages, built)


def _assemble(job: Job, context: RunContext, built: BuiltModel, operations: _Operations) -> Run:
    allocate(built.model, context.device)
    for module in built.model.modules():
        if isinstance(module, Initialises):
            module.init_buffers(context.device)
    loss = context.build(job.loss)

    def counted(*arguments: Any) -> Any:
        with operations:
            return loss(*arguments)

    return assemble(job, context, built, counted, (), HookRunner({}))


def _announce(block: Any, name: str, lowering: Lowering) -> None:
    """Let graphs of a block have its name: the class of the block without numbers of layers."""
    compiled = block._compiled_call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        lowering.block = name
        return compiled(*args, **kwargs)

    block._compiled_call_impl = call
