"""The stage of the component `ep`: divides experts over ranks, which exchange tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from forge_core.contracts.errors import Problem
from forge_core.contracts.runtime import ParallelStage
from forge_core.parallel.mesh import local_part
from forge_kit.nn.dispatch import ExpertRanks, ExpertStack, TokenDispatcher
from forge_kit.nn.mesh import arrange
from forge_plugin_parallel.dispatchers import AllToAll
from forge_plugin_parallel.ep_exchange import Exchange, LocalExperts

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.model import Model
    from forge_plugin_parallel.ep import ExpertParallel


def stack_problems(model: Model, ranks: int) -> Iterator[Problem]:
    """Yields why `ranks` ranks cannot share the experts of a model; only the first of equal layers."""
    if ranks == 1:
        return
    kind = type(model).__name__
    stacks = list(_stacks(model))
    if not stacks:
        yield Problem("", f"{kind} has no experts; leave the stage out")
    for name, stack in stacks:
        experts = next(stack.parameters()).shape[0]
        if experts % ranks:
            yield Problem(
                "degree", f"{name} has {experts} experts, which {ranks} ranks cannot share equally; change one"
            )
            return


def _stacks(model: Model) -> Iterator[tuple[str, nn.Module]]:
    yield from ((name, model.get_submodule(name)) for name in model.expert_stacks())


def expert_mesh(context: BuildContext, experts: Mapping[str, int]) -> DeviceMesh:
    """Arrange the run's ranks in a mesh in which `shard` x `cp` is divided by experts. Collective.

    Args:
        context: the run's mesh and layout.
        experts: sizes of the dimensions along which ranks hold different experts, outermost first.

    Returns:
        A mesh with `edp` (ranks that hold the same experts) and the dimensions of `experts` for `shard` and `cp`.
        Expert dimensions are innermost: neighbouring ranks hold different experts, so tokens stay within a node if they
        can.
    """
    assert context.mesh is not None
    layout = context.layout
    sizes: dict[str, int] = {}
    for name, size in layout.degrees.items():
        # `edp` and the experts' dimensions take the ranks of `shard` and `cp`, in the place of `cp`
        if name == "cp":
            sizes |= {"edp": layout.shard * layout.cp // math.prod(experts.values()), **experts}
        elif name != "shard":
            sizes[name] = size
    return arrange(context.mesh, sizes)


class ExpertParallelStage(ParallelStage):
    """See `forge_core.contracts.runtime.ParallelStage`."""

    def __init__(self, component: ExpertParallel, context: BuildContext) -> None:
        self._ranks, self._per_node = component.degree, component.ranks_per_node
        self._overlap = component.overlap
        self._component, self._context = component.dispatcher, context.at("parallel.ep.dispatcher")
        self._dispatchers: dict[tuple[str, int], TokenDispatcher] = {}
        if self._ranks > 1:
            self._mesh = expert_mesh(context, {"ep": self._ranks})
            if self._per_node:
                nodes = {"epacross": self._ranks // self._per_node, "epwithin": self._per_node}
                self._nodes = expert_mesh(context, nodes)
            copies = ["replicate"] if context.layout.replicate > 1 else []
            self._data_mesh = self._mesh[(*copies, "edp")]

    def apply(self, model: Model) -> Model:
        """Keep each rank's experts, and make stacks exchange tokens between ranks."""
        if self._ranks == 1:
            return model
        for _, stack in _stacks(model):
            experts = next(stack.parameters()).shape[0] // self._ranks
            for module in stack.modules():
                self._split(module)
            # `fsdp` shards these parameters over the ranks with the same experts only.
            stack.data_mesh = self._data_mesh  # type: ignore[assignment]
            shared = self._shared(LocalExperts(stack, stack.forward), experts)
            # Row counts differ from step to step, and the compiler would recompile for each.
            stack.forward = torch.compiler.disable(shared)
        return model

    def describe(self) -> str:
        """Returns over how many ranks experts are split."""
        if self._ranks == 1:
            return "each rank has all experts"
        nodes = f", {self._per_node} a node" if self._per_node else ""
        split = f"experts split over {self._ranks} ranks{nodes}, and these over {self._data_mesh.shape[-1]}"
        by = "" if isinstance(self._component, AllToAll) else f"; tokens sent by {type(self._component).__name__}"
        return f"{split}{by}"

    def _shared(self, local: ExpertStack, experts: int) -> ExpertStack:
        """The exchange around a stack with `experts` experts on this rank."""
        if not self._per_node:
            return Exchange(local, self._dispatcher("ep", experts), self._overlap)
        nodes = self._ranks // self._per_node
        of_node = Exchange(local, self._dispatcher("epwithin", experts, outer=nodes))
        return Exchange(of_node, self._dispatcher("epacross", experts * self._per_node), self._overlap)

    def _dispatcher(self, dimension: str, experts: int, outer: int = 1) -> TokenDispatcher:
        """The dispatcher along a dimension of the mesh, the same for all stacks with equally many experts."""
        key = dimension, experts
        if key not in self._dispatchers:
            mesh = self._mesh if dimension == "ep" else self._nodes
            ranks = ExpertRanks(mesh[dimension].get_group(), experts, outer)
            self._dispatchers[key] = self._context.build(self._component, ranks=ranks)
        return self._dispatchers[key]

    def _split(self, module: nn.Module) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            split = nn.Parameter(self._part(parameter), parameter.requires_grad)
            module.register_parameter(key, split)

    def _part(self, parameter: Tensor) -> DTensor:
        """The parameter with dimension 0 split over the ranks, on top of the split by tp; without communication."""
        local = local_part(parameter)
        # On the meta device, so only the shape counts: values are drawn after all stages
        own = torch.empty(local.shape[0] // self._ranks, *local.shape[1:], dtype=local.dtype, device=local.device)
        mesh: DeviceMesh = self._mesh["ep"]
        placements: list[Placement] = [Shard(0)]
        if isinstance(parameter, DTensor):
            mesh, placements = self._mesh["ep", "tp"], [Shard(0), *parameter.placements]
        return DTensor.from_local(
            own, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
