"""The stage of the component `tp`: splits the matrices of a model (Megatron-LM, Shoeybi et al. 2019).

Every parameter becomes a DTensor on the tensor-parallel mesh: split, or whole on each rank. While a module runs, this
rank's local tensors replace its parameters, so models contain no code for tensor parallelism, and no operation pays for
the dispatch of DTensors.

Shapes: B sequences, S positions, s positions of this rank (S without sequence parallel), D model width, v rows of the
vocabulary of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from forge_core.contracts.model import VocabShard
from forge_core.contracts.runtime import ParallelStage
from forge_core.parallel.initialise import ties
from forge_core.parallel.mesh import local_part, sum_gradients
from forge_kit.nn.generation import Generates, join
from forge_kit.nn.modules import MatrixShard
from forge_plugin_parallel.generation import SameRows, WholeSequences
from forge_plugin_parallel.tp_plan import ways_of
from forge_plugin_parallel.tp_ways import AT_REST, NEVER, Ranks, Way, give_class

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Carry, Model
    from forge_plugin_parallel.tp import TensorParallel


class TensorParallelStage(ParallelStage):
    """See `forge_core.contracts.runtime.ParallelStage`."""

    def __init__(self, component: TensorParallel, context: BuildContext) -> None:
        assert context.mesh is not None
        self._mesh = context.mesh["tp"]
        self._ranks = Ranks(
            self._mesh.get_group(),
            self._mesh.get_local_rank(),
            sequence_parallel=component.sequence_parallel,
            loss_parallel=component.loss_parallel,
        )
        # One object for all modules alike: torch.compile treats each object as another constant, and would recompile.
        self._matrices = [MatrixShard(self._ranks.group, dimension) for dimension in (0, 1)]
        self._partial: list[tuple[nn.Module, str]] = []
        """Whole parameters of whose gradients each rank computes a part."""

    def apply(self, model: Model) -> Model:
        """Split the modules that the model's plan names."""
        if self._mesh.size() == 1:
            return model
        ways = {name: way for name, way in ways_of(model).items() if isinstance(way, Way)}
        for name, module in list(model.named_modules()):
            if name in ways:
                self._split(module, ways[name])
        # Two tied modules now have separate split parameters: tie them before the loop below, which reads parameters.
        _tie_again(model)
        for name, module in model.named_modules():
            if name in ways and not (ways[name].needs_parameters and next(module.parameters(), None) is None):
                self._run_split(module, ways[name])
        model.finish = _Finish(model.finish, self._ranks)  # type: ignore[method-assign]
        if isinstance(model, Generates):
            model.decode = WholeSequences(model.decode, self._ranks)  # type: ignore[method-assign]
            join(model, SameRows(model))
        return model

    def complete_gradients(self, model: Model) -> None:
        """Sum partial gradients over the ranks."""
        partial = (module.get_parameter(key) for module, key in self._partial)
        sum_gradients(partial, lambda flat: dist.all_reduce(flat, group=self._ranks.group))

    def _split(self, module: nn.Module, way: Way) -> None:
        """Replace a module's parameters by DTensors."""
        for key, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):  # tied to one that is split already
                continue
            dimension = way.split.get(key)
            placement: Placement = Replicate() if dimension is None else Shard(dimension % parameter.ndim)
            split = nn.Parameter(_distribute(parameter, self._mesh, placement), parameter.requires_grad)
            module.register_parameter(key, split)

    def _is_partial(self, way: Way, key: str) -> bool:
        """Whether each rank computes only a part of this parameter's gradient."""
        if way.partial == AT_REST and not self._ranks.sequence_parallel:
            return False  # every rank has all positions
        return way.partial != NEVER and way.split.get(key) is None

    def _run_split(self, module: nn.Module, way: Way) -> None:
        """Make a module compute with this rank's parts, with the collectives of its way."""
        keys = [key for key, _ in module.named_parameters(recurse=False)]
        self._partial += [(module, key) for key in keys if self._is_partial(way, key)]
        if way.matrix is not None and module.get_parameter("weight").ndim == 2:
            module.matrix_shard = self._matrices[way.matrix]  # type: ignore[assignment]
        if way.vocabulary and self._ranks.loss_parallel:
            rows = local_part(next(module.parameters())).shape[0]
            module.vocab_shard = VocabShard(self._ranks.group, self._ranks.rank * rows, rows)  # type: ignore[assignment]
        give_class(module, way.module)
        module.tp_ranks = self._ranks  # type: ignore[assignment]


def _distribute(parameter: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """A DTensor of this shape on the meta device, without communication."""
    shape = list(parameter.shape)
    if isinstance(placement, Shard):
        shape[placement.dim] //= mesh.size()
    local = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
    return DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def _tie_again(model: Model) -> None:
    # Parameters were replaced module by module, which breaks ties
    for other, name in ties(model).items():
        module, _, key = other.rpartition(".")
        setattr(model.get_submodule(module), key, model.get_parameter(name))


@frozen
class _Finish:
    """`Model.finish` followed by a gather of all positions: the head computes a part of the vocabulary for each."""

    finish: Callable[[Carry, Batch], Tensor]
    ranks: Ranks

    def __call__(self, carry: Carry, batch: Batch) -> Tensor:
        return self.ranks.enter(self.finish(carry, batch))
