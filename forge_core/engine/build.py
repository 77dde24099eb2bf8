"""From a job to a run that is ready for its first step."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import asdict, evolve, field, frozen

from forge_core.auxiliary import Auxiliary
from forge_core.checkpoint.run_folder import TOKENIZER
from forge_core.checkpoint.state import model_tensors
from forge_core.config.mixture import is_drawn
from forge_core.contracts.components import Component, DatasetComponent, TrainingHook
from forge_core.contracts.contexts import BuildContext, Evaluation
from forge_core.contracts.data import Dataset, Documents, Stream, Tokenizer
from forge_core.contracts.errors import JobError
from forge_core.contracts.model import Model, Outline
from forge_core.contracts.optimizer import NamedParameters, roles_of
from forge_core.contracts.phase import Phase
from forge_core.contracts.runtime import Executor, LossFunction, ParallelStage
from forge_core.data.loader import held_out
from forge_core.devices import query_device
from forge_core.engine.executor import Brought, SplittingExecutor
from forge_core.engine.groups import Rates, apply_settings, check_groups, check_modes
from forge_core.engine.hooks import HookRunner, collect_hooks
from forge_core.job import Job
from forge_core.launch.progress_beacon import ProgressBeacon
from forge_core.parallel.initialise import bare_context, bare_model, check_finite, materialise, ties
from forge_core.parallel.layout import layout_of
from forge_core.parallel.mesh import choose_device, make_mesh, world_size
from forge_core.parallel.stages import OrderedStage, apply_stages, order_stages, with_owner
from forge_core.plugins.catalog import Catalog
from forge_core.plugins.manager import RunContext


@frozen
class BuiltModel:
    """A model to which the stages have been applied."""

    model: Model
    outline: Outline
    """Facts of the whole model; `model` may have only some of its layers."""
    stages: Sequence[OrderedStage]
    built_stages: Sequence[ParallelStage]


@frozen(kw_only=True)
class Run(BuiltModel):
    """Everything a job builds."""

    job: Job
    context: RunContext
    datasets: Sequence[Dataset | Stream]
    held_out: Dataset | None
    parameters: NamedParameters
    optimizer: torch.optim.Optimizer
    rates: Rates
    executor: Executor
    hooks: HookRunner
    evaluations: Mapping[str, Evaluation] = field(factory=dict)

    @property
    def references(self) -> dict[str, Any]:
        """Fields that the contexts of all hooks have."""
        return {
            "job": self.job,
            "model": self.model,
            "optimizer": self.optimizer,
            "build": self.context,
            "executor": self.executor,
            "tokenizer": self.context.tokenizer,
            "folder": self.context.folder,
        }


def build_context(job: Job, catalog: Catalog, folder: Path | None) -> RunContext:
    """Device, mesh and plugins of a job; nothing that depends on its data or model.

    Raises:
        JobError: the layout does not fit the number of ranks, or a plugin cannot be used.
    """
    device = choose_device(job.train.device)
    # Plugins before the mesh: one that cannot be used ends the run without a process group whose ranks would wait.
    context = bare_context(job, job.layout_for(world_size()) or layout_of(job, world_size()), catalog, device)
    query_device(device, "set_device")  # before NCCL: its first collective takes the current device
    # Set in every run: another run of the same process may have left its own settings.
    torch.set_float32_matmul_precision(job.train.float32_matmul)
    context.plugins.configure_backend(job, device)
    if job.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before its first product: torch demands it
    if torch.are_deterministic_algorithms_enabled() != job.train.deterministic:  # the call imports the compiler
        torch.use_deterministic_algorithms(job.train.deterministic)
    return evolve(context, mesh=make_mesh(context.layout, device), auxiliary=Auxiliary(device), folder=folder)


def build_run(
    job: Job, context: RunContext, hooks: Iterable[TrainingHook] = (), beacon: ProgressBeacon | None = None
) -> Run:
    """Build data, model, optimizer and everything else, in this order; `hooks` run after the job's hooks.

    Raises:
        JobError: the job cannot run as written.
    """
    # The tokenizer first: data and model need it. Data before the model: errors appear before memory is allocated.
    context = evolve(context, tokenizer=build_tokenizer(job, context))
    datasets = build_datasets(job, context)
    evaluations = {name: _build(each, context, f"evaluations.{name}") for name, each in job.evaluations.items()}
    runner = HookRunner(collect_hooks(job, context.plugins, hooks), beacon)
    runner.beacon.enter(Phase.BUILDING)  # each part may take minutes, and the watchdogs of all ranks are watching
    run = assemble(job, context, build_model(job, context), context.build(job.loss), datasets, runner)
    return evolve(run, evaluations=evaluations)


def assemble(
    job: Job,
    context: RunContext,
    built: BuiltModel,
    loss: LossFunction,
    datasets: Sequence[Dataset | Stream],
    hooks: HookRunner,
) -> Run:
    """Build what needs a model in memory, and put all of it together."""
    # After the stages, which have sharded the parameters by now. Roles are the bare model's: wrappers hide its modules.
    parameters = NamedParameters.of(built.model, built.outline.roles)
    optimizer = context.build(job.optimizer, parameters=parameters)
    check_modes(optimizer)
    check_groups(optimizer.param_groups, parameters)
    # By the engine and not by optimizers, none of which needs to know of patterns; before `Rates` reads the base rates.
    apply_settings(optimizer, job.optimizer.groups, built.outline)
    return Run(
        **asdict(built, recurse=False),
        job=job,
        context=context,
        datasets=datasets,
        held_out=held_out(datasets),
        parameters=parameters,
        optimizer=optimizer,
        rates=Rates(job, optimizer, context),
        executor=build_executor(job, context, built, loss),
        hooks=hooks,
    )


def build_tokenizer(job: Job, context: BuildContext) -> Tokenizer | None:
    """The tokenizer that the run folder keeps, or else a new one."""
    component = job.data.tokenizer
    if component is None:
        return None
    # The one in the folder first: a continued run must not retrain a tokenizer on data that may have grown since.
    if context.folder is not None and (context.folder / TOKENIZER).is_dir():
        return component.load(context, context.folder / TOKENIZER)

    def documents() -> Iterator[str]:
        for number, source in enumerate(job.data.sources):
            with _table(f"data.sources.{number}"):
                yield from source.documents()

    return context.build(component, documents=documents)


def build_datasets(job: Job, context: BuildContext) -> list[Dataset | Stream]:
    """Every source, as sequences, which the packing makes of documents.

    Raises:
        JobError: one is too small to give a single sequence, or does not go with the packing.
    """
    datasets = []
    for number, source in enumerate(job.data.sources):
        dataset = _build_dataset(source, path := f"data.sources.{number}", context)
        if isinstance(dataset, Sized) and not len(dataset) and is_drawn(job, number):
            raise JobError.at(
                path,
                f"holds less than one sequence of train.seq_len = {job.train.seq_len} tokens; "
                "add data, or shorten train.seq_len",
            )
        datasets.append(dataset)
    return datasets


def _build_dataset(source: DatasetComponent, path: str, context: BuildContext) -> Dataset | Stream:
    packing = context.job.data.packing
    built = _build(source, context, path)
    if isinstance(built, Documents):
        return context.build(packing, documents=built)
    if not packing.accepts_sequences and not (isinstance(built, Stream) and built.is_packed):
        raise JobError.at(path, "gives finished sequences, which [data.packing] cannot pack")
    if isinstance(built, Stream):
        if context.layout.run[1] > 1:
            raise JobError.at(path, "is a stream, whose position other runs of the same model do not know")
        if context.job.train.batch_schedule:
            raise JobError.at(path, "is a stream, whose lanes need batches of one size; leave train.batch_schedule out")
        # Each row of the global batch belongs to one lane: the position of a stream then depends on no layout.
        rows, ranks = context.job.train.global_batch_size, context.layout.data_parallel
        if rows % built.lanes or built.lanes % ranks:
            raise JobError.at(
                path,
                f"is read in {built.lanes} lanes; they must divide train.global_batch_size = {rows} "
                f"and be a multiple of the {ranks} data-parallel ranks",
            )
    return built


@contextmanager
def _table(path: str) -> Iterator[None]:
    """A component states its problems relative to its own table; within this context, that is `path`."""
    try:
        yield
    except JobError as error:
        raise JobError(problem.below(path) for problem in error.problems) from error


def _build(component: Component, context: BuildContext, path: str) -> Any:
    with _table(path):
        return context.build(component)


def build_model(job: Job, context: RunContext) -> BuiltModel:
    """Build on the meta device, apply the stages in order, then give memory and initial values."""
    model, outline = build_bare_model(job, context)
    stages = stages_of(job, context)
    model, built = apply_stages(model, stages, context)
    # Memory last: each rank allocates only what stages have left it, and draws its part of the same initial values.
    home = next((stage.parameter_device for stage in built if stage.parameter_device is not None), None)
    materialise(model, context.device, job.job.seed, home)
    check_finite(model)  # memory began as NaN: a parameter that nobody initialised is found here
    return BuiltModel(model, outline, stages, built)


def build_bare_model(job: Job, context: BuildContext) -> tuple[Model, Outline]:
    """The whole model, on the meta device, and its outline: after a pipeline's cut no rank has all of it."""
    model = bare_model(job, context)
    return model, Outline(
        roles=roles_of(model),
        sizes={name: parameter.numel() for name, parameter in model.named_parameters()},
        tensors={name: tensor.shape for name, tensor in model_tensors(model).items()},
        ties=ties(model),
        flops=model.flops(job.train.seq_len),
        backend_choices=model.backend_choices(job.train.seq_len),
    )


def stages_of(job: Job, context: RunContext) -> list[OrderedStage]:
    """The stages in order, with the one that the core adds; a `JobError` reports contradictory relations."""
    catalog = context.plugins.catalog
    return order_stages(with_owner(job, context.layout, catalog), catalog)


def build_executor(job: Job, context: BuildContext, built: BuiltModel, loss: LossFunction) -> Executor:
    """The executor of the stage that brings one, else the job's; it receives this rank's part of each micro-batch."""
    model, stages = built.model, built.built_stages
    brought = (stage.executor(model, loss, stages) for stage in stages)
    component = next((Brought(executor=executor) for executor in brought if executor is not None), job.executor)
    # Through the hooks in both cases: a plugin that wraps executors wraps a pipeline's too
    executor = context.build(component, model=model, loss=loss, stages=stages)
    # Where a stage divides sequences, the executor alone sees this rank's part: hooks and evaluations see whole ones.
    splits = [stage.split for stage in stages if type(stage).split is not ParallelStage.split]
    if not splits:
        return executor
    # Before the first split: afterwards no rank sees the neighbours of its last position.
    return SplittingExecutor(executor, [model.prepare_sequences, *splits])
