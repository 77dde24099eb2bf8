"""The stage of the component `pp`: cuts a model and removes from each rank the sections of the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist
from attrs import define
from torch import Tensor, nn

from forge_core.contracts.errors import ForgeError
from forge_core.contracts.runtime import ParallelStage
from forge_core.parallel.initialise import ties
from forge_core.parallel.mesh import group_timeout, sum_gradients
from forge_kit.nn.generation import Generates, join
from forge_plugin_parallel.cuts import Section, balance, ranks_of, sections
from forge_plugin_parallel.generation import PipelinedGeneration, SectionDecode
from forge_plugin_parallel.loss_check import check_loss
from forge_plugin_parallel.pp import V_SHAPED

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Carry, Model
    from forge_core.contracts.runtime import Executor, LossFunction
    from forge_plugin_parallel.pp import PipelineParallel


@define(kw_only=True)
class Pipeline:
    """The ranks of a pipeline and the sections of each; shared by the stage and its executor."""

    group: dist.ProcessGroup
    ranks: int
    rank: int
    """This rank's number in `group`."""
    owners: Sequence[int]
    """Rank of each pipeline stage in `group`."""
    sections: Sequence[Section] = ()
    """The part of the model that each pipeline stage computes; set when the model is cut."""


class PipelineParallelStage(ParallelStage):
    """Keeps the layers of this rank's pipeline stages, and provides the executor that runs micro-batches through them.

    A parameter tied between the two ends exists on every rank that holds either end. Its gradients are summed over
    these ranks, so that their copies receive the same update.
    """

    def __init__(self, component: PipelineParallel, context: BuildContext) -> None:
        assert context.mesh is not None
        self._component, self._context = component, context
        self._mesh = context.mesh
        self._pipeline = Pipeline(
            group=context.mesh.get_group("pp"),
            ranks=context.layout.pp,
            rank=context.mesh.get_local_rank("pp"),
            owners=ranks_of(component.stages, context.layout.pp, component.schedule in V_SHAPED),
        )
        self._shared: dict[str, tuple[int, ...]] = {}
        """Pipeline ranks that hold a parameter, by its name, for parameters on several ranks."""

    def apply(self, model: Model) -> Model:
        """Remove modules of other ranks' sections, and let `model(batch, carry, section)` compute one section."""
        layers, ends = model.layers, model.ends()
        assert ends is not None
        self._pipeline.sections = sections(list(layers), self._layer_counts(model))
        # All ranks' modules, not only this one's: process groups of shared parameters are created by every rank alike.
        modules_by_rank = [self._modules_of(model, rank) for rank in range(self._pipeline.ranks)]
        self._find_shared(model, modules_by_rank)  # before modules go: it reads the parameters of all ranks
        own = modules_by_rank[self._pipeline.rank]
        for name in list(layers):
            if f"layers.{name}" not in own:
                del layers[name]
        for end in ends:
            for name in set(end) - own:  # replaced rather than deleted: the model's own code refers to them
                parent, _, key = name.rpartition(".")
                setattr(model.get_submodule(parent), key, Absent(name, self._pipeline.rank))
        model.forward = SectionForward(model)  # type: ignore[method-assign, assignment]
        _keep_roles(model)
        if isinstance(model, Generates):
            decode = SectionDecode(model, model.decode)
            model.decode = decode  # type: ignore[method-assign]
            join(model, PipelinedGeneration(model, self._pipeline, decode))
        return model

    def describe(self) -> str:
        """Returns the schedule, and the number of layers of each stage, in order."""
        counts = ", ".join(str(len(section.layers)) for section in self._pipeline.sections)
        return f"{self._component.schedule}, stages of {counts} layers"

    def executor(self, model: Model, loss: LossFunction, stages: Sequence[ParallelStage]) -> Executor:
        """Returns the executor of the pipeline's schedule.

        Raises:
            JobError: the loss holds a model that is divided among the ranks of the pipeline.
        """
        from forge_plugin_parallel.pipeline_executor import PipelineExecutor

        check_loss(loss, self._pipeline.group)
        return PipelineExecutor(model, loss, stages, self._pipeline, self._component.schedule, self._context)

    def complete_gradients(self, model: Model) -> None:
        """Sum the gradients of parameters that several ranks hold."""
        for ranks, group in self._groups.items():
            if self._pipeline.rank in ranks:  # a rank between the ends holds none of these parameters
                shared = [model.get_parameter(name) for name, holders in self._shared.items() if holders == ranks]
                sum_gradients(shared, partial(dist.all_reduce, group=group))

    def counted_elsewhere(self, model: Model) -> Iterable[nn.Parameter]:
        """Returns the shared parameters of which this rank is not the first holder, which alone counts them."""
        shared = [name for name, ranks in self._shared.items() if self._pipeline.rank in ranks[1:]]
        return [model.get_parameter(name) for name in shared]

    # --- cutting ---------------------------------------------------------------------------------------------------

    def _layer_counts(self, model: Model) -> Sequence[int]:
        """Layers per pipeline stage: the job's, else balanced by FLOPs, or by weights where the model has no FLOPs."""
        if self._component.layers:
            return self._component.layers
        length, first = self._context.job.train.seq_len, 0.0
        flops, layer_flops = model.flops(length), model.layer_flops(length)
        if flops is not None and layer_flops is not None:
            costs, first = list(layer_flops), model.embed_flops(length)
            last = flops - first - sum(costs)
        else:
            _, end = model.ends() or ((), ())
            costs = [_weights(layer) for layer in model.layers.values()]
            last = sum(_weights(model.get_submodule(name)) for name in end)
        return balance(costs, len(self._pipeline.owners), first, last)

    def _modules_of(self, model: Any, rank: int) -> set[str]:
        """Names of the modules of a rank: its layers, and modules of an end that it holds."""
        owned = zip(self._pipeline.sections, self._pipeline.owners, strict=True)
        own = [section for section, owner in owned if owner == rank]
        modules = {f"layers.{name}" for section in own for name in section.layers}
        first, last = model.ends()
        modules |= set(first) if any(section.first for section in own) else set()
        modules |= set(last) if any(section.last for section in own) else set()
        # After the ends: a rank that holds one of two tied modules needs both, so that the tie itself stays intact.
        for pair in ties(model).items():
            tied = {name.rpartition(".")[0] for name in pair}
            modules |= tied if tied & modules else set()
        return modules

    def _find_shared(self, model: nn.Module, modules_by_rank: Sequence[set[str]]) -> None:
        """Record which ranks hold a parameter together, and create their process groups. Collective."""
        holders: dict[str, list[int]] = {}
        for rank, modules in enumerate(modules_by_rank):
            for module in modules:
                for name, _ in model.get_submodule(module).named_parameters(prefix=module):
                    holders.setdefault(name, []).append(rank)
        names = {name for name, _ in model.named_parameters()}
        self._shared = {name: tuple(ranks) for name, ranks in holders.items() if len(ranks) > 1 and name in names}
        # Sorted, as creating a group is collective: every rank of the run must create them in the same order.
        self._groups = {ranks: self._group_of(ranks) for ranks in sorted(set(self._shared.values()))}

    def _group_of(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The process group of some ranks of this pipeline. All ranks of the run create every pipeline's groups."""
        lines = self._mesh.mesh.movedim(self._mesh.mesh_dim_names.index("pp"), 0).flatten(1)  # type: ignore[union-attr]
        lists = lines[list(ranks)].T.tolist()
        group, _ = dist.new_subgroups_by_enumeration(lists, timeout=group_timeout())
        return group


class SectionForward:
    """Replaces a model's `forward` by the forward pass of one section."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, batch: Batch, carry: Carry = (), section: Section | None = None) -> Carry | Tensor:
        """Run one section of the model.

        Args:
            batch: one micro-batch; every rank holds all of it.
            carry: activations from the section before; ignored by the first section.
            section: the section to run.

        Returns:
            The carry after the section, or after the last one the final hidden states (B, S, D).

        Raises:
            ForgeError: called without a section, like a whole model.
        """
        if section is None:
            raise ForgeError("in a pipeline no rank has the whole model: use the executor (context.executor) instead")
        model = self._model
        if section.first:
            carry = model.embed(batch)
        for name in section.layers:
            carry = model.layers[name](carry, batch)
        return model.finish(carry, batch) if section.last else carry


class Absent(nn.Module):
    """Replaces a module that another pipeline rank holds."""

    def __init__(self, name: str, rank: int) -> None:
        super().__init__()
        self._message = f"pipeline rank {rank} does not have {name}"

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises ForgeError: a call means that code ran on a rank to which it does not belong."""
        raise ForgeError(self._message)


def _keep_roles(model: Model) -> None:
    """Restrict the model's declared roles to the parameters of this rank."""
    own = {name for name, _ in model.named_parameters()}
    roles = {name: role for name, role in model.parameter_roles().items() if name in own}
    model.parameter_roles = lambda: roles  # type: ignore[method-assign]


def _weights(module: nn.Module) -> float:
    """Number of weights that multiply a token."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.ndim > 1)
