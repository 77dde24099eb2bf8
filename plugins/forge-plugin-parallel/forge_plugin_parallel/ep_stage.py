"""What the component `ep` builds.

Shapes: M rows, each a token for one expert, ordered by expert; e experts on each rank; R ranks; D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from forge_core.errors import Problem
from forge_core.parallel.mesh import expert_mesh, local_part
from forge_core.protocols import HasExpertStacks
from forge_plugin_parallel.collectives import exchange_rows
from forge_plugin_parallel.tp_stage import local_parameters

if TYPE_CHECKING:
    from forge_core.context import BuildContext
    from forge_core.protocols import Model
    from forge_plugin_parallel.ep import ExpertParallel


def stack_problems(model: Model, ranks: int) -> Iterator[Problem]:
    """Why `ranks` ranks cannot share the experts of a model; of layers that are alike, the first one's."""
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
    assert isinstance(model, nn.Module)
    if isinstance(model, HasExpertStacks):
        yield from ((name, model.get_submodule(name)) for name in model.expert_stacks())


class ExpertParallelStage:
    """See `forge_core.protocols.ParallelStage`."""

    def __init__(self, component: ExpertParallel, context: BuildContext) -> None:
        self._ranks = component.degree
        if self._ranks > 1:
            self._mesh = expert_mesh(context.mesh, context.layout)
            copies = ["replicate"] if context.layout.replicate > 1 else []
            self._data_mesh = self._mesh[(*copies, "edp")]

    def apply(self, model: Model) -> Model:
        """Leave each rank its experts, and let it exchange rows with the others."""
        if self._ranks == 1:
            return model
        for _, stack in _stacks(model):
            for module in stack.modules():
                self._split(module)
            stack.data_mesh = self._data_mesh  # type: ignore[assignment]
            stack.forward = _Exchanged(stack, stack.forward, self._mesh["ep"].get_group())
        return model

    def describe(self) -> str:
        """Over how many ranks experts are split."""
        return f"experts split over {self._ranks} ranks, and these over {self._data_mesh.shape[-1]}"

    def _split(self, module: nn.Module) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            split = nn.Parameter(self._part(parameter), parameter.requires_grad)
            module.register_parameter(key, split)

    def _part(self, parameter: Tensor) -> DTensor:
        """Its first dimension split over the ranks, besides what tp has split. No rank speaks to another."""
        local = local_part(parameter)
        own = torch.empty(local.shape[0] // self._ranks, *local.shape[1:], dtype=local.dtype, device=local.device)
        mesh: DeviceMesh = self._mesh["ep"]
        placements: list[Placement] = [Shard(0)]
        if isinstance(parameter, DTensor):
            mesh, placements = self._mesh["ep", "tp"], [Shard(0), *parameter.placements]
        return DTensor.from_local(
            own, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )


@frozen
class _Exchanged:
    """Runs a stack of this rank's experts on the rows that all ranks have for them.

    Two collectives a pass carry rows to the experts and back, after a small one with their numbers; the host waits for
    these, as it must know how much to send.
    """

    stack: nn.Module
    forward: Callable[[Tensor, Tensor], Tensor]
    group: dist.ProcessGroup

    def __call__(self, rows: Tensor, counts: Tensor) -> Tensor:
        ranks = dist.get_world_size(self.group)
        wanted = counts.view(ranks, -1)
        offered = torch.empty_like(wanted)  # (R, e): rows that each rank has for each expert of this one
        dist.all_to_all_single(offered, wanted.contiguous(), group=self.group)
        sent, received = _sizes(rows, wanted, offered)
        theirs = exchange_rows(rows, sent, received, self.group)
        by_expert = _by_expert(offered, len(theirs))
        results = _reordered(theirs, by_expert)
        with local_parameters(*self.stack.modules()):
            results = self.forward(results, offered.sum(0))
        return exchange_rows(_reordered(results, by_expert.flip(0)), received, sent, self.group)


def _sizes(rows: Tensor, wanted: Tensor, offered: Tensor) -> tuple[Sequence[int], Sequence[int]]:
    """How many rows go to each rank, and come from each. While a step is planned, nobody knows: then all alike."""
    if isinstance(wanted, FakeTensor):
        shares = [len(part) for part in torch.arange(len(rows)).tensor_split(len(wanted))]
        return shares, shares
    sent, received = torch.stack([wanted.sum(1), offered.sum(1)]).tolist()
    return sent, received


def _by_expert(offered: Tensor, rows: int) -> Tensor:
    """(2, M): an order of rows that arrived rank by rank in which they are expert by expert, and its inverse."""
    experts = torch.arange(offered.shape[1], device=offered.device).repeat(offered.shape[0])
    order = experts.repeat_interleave(offered.flatten(), output_size=rows).argsort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return torch.stack([order, inverse])


def _reordered(rows: Tensor, order: Tensor) -> Tensor:
    return _Reorder.apply(rows, *order.unbind())


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None
