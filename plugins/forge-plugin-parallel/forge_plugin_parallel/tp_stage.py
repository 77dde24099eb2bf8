"""What the component `tp` builds.

Every parameter becomes a DTensor on the tensor-parallel mesh: split, or whole on each rank. Modules compute on plain
tensors all the same: while one runs, this rank's parts stand in for its parameters. So a model needs to know of nothing
here, and no operation pays for the dispatch of DTensors.

Shapes: B sequences, S positions, s positions of this rank (S without sequence parallel), D model width, v rows of the
vocabulary of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from forge_core.contracts.model import HasTensorParallelPlan, MatrixShard, VocabShard
from forge_core.contracts.runtime import ParallelStage
from forge_core.parallel.initialise import ties
from forge_core.parallel.mesh import local_part
from forge_core.parallel.reduce import sum_gradients
from forge_plugin_parallel.collectives import all_gather, all_reduce, fan_out, gather_equal, reduce_scatter
from forge_plugin_parallel.tp_plan import ENDS, INPUT, MATRICES, OUTPUT, SPLIT, ways_of

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Carry, Model
    from forge_plugin_parallel.tp import TensorParallel

SEQUENCE = 1
"""Dimension of the sequence in activations (B, S, D)."""


class TensorParallelStage(ParallelStage):
    """See `forge_core.contracts.runtime.ParallelStage`."""

    def __init__(self, component: TensorParallel, context: BuildContext) -> None:
        assert context.mesh is not None
        self._mesh = context.mesh["tp"]
        self._group = self._mesh.get_group()
        self._ranks, self._rank = self._mesh.size(), self._mesh.get_local_rank()
        self._sequence_parallel = component.sequence_parallel
        self._loss_parallel = component.loss_parallel
        self._partial: list[tuple[nn.Module, str]] = []
        """Parameters whose gradients each rank has a part of."""

    def apply(self, model: Model) -> Model:
        """Split the modules that the model's plan names."""
        if self._ranks == 1:
            return model
        assert isinstance(model, HasTensorParallelPlan)
        assert isinstance(model, nn.Module)
        ways = ways_of(model)
        for name, module in list(model.named_modules()):
            if name in ways:
                self._split(module, ways[name])
        _tie_again(model)
        for name, module in model.named_modules():
            if name in ways and (ways[name] in ENDS or next(module.parameters(), None) is not None):
                self._run_split(module, ways[name])
        model.finish = _Finish(model.finish, self._enter)
        return model

    def complete_gradients(self, model: Model) -> None:
        """Sum, over the ranks, the gradients that each has a part of."""
        partial = (module.get_parameter(key) for module, key in self._partial)
        sum_gradients(partial, lambda flat: dist.all_reduce(flat, group=self._group))

    # --- parameters ------------------------------------------------------------------------------------------------

    def _split(self, module: nn.Module, way: str) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):  # tied to one that is split already
                continue
            dimension = SPLIT.get(way, {}).get(key)
            placement: Placement = Replicate() if dimension is None else Shard(dimension % parameter.ndim)
            split = nn.Parameter(_distribute(parameter, self._mesh, placement), parameter.requires_grad)
            module.register_parameter(key, split)

    def _is_partial(self, way: str, key: str) -> bool:
        """Whether each rank has a part of a gradient only."""
        if way == "replicate":
            return True  # it works on this rank's heads or columns
        at_rest = way == "sequence" or (way == "row" and key == "bias")
        return at_rest and self._sequence_parallel  # it works on this rank's positions

    # --- modules ---------------------------------------------------------------------------------------------------

    def _run_split(self, module: nn.Module, way: str) -> None:
        """Let a module compute its part, with the collectives that its way asks for."""
        keys = [key for key, _ in module.named_parameters(recurse=False)]
        self._partial += [(module, key) for key in keys if self._is_partial(way, key)]
        if way in MATRICES and module.get_parameter("weight").ndim == 2:
            dimension = 0 if way == "column" else 1
            module.matrix_shard = MatrixShard(self._group, dimension)  # type: ignore[assignment]
        if way == INPUT:
            module.forward = _Gathered(module.forward, self._enter)
        elif way == OUTPUT:
            module.forward = _Summed(module.forward, self._leave_partial)
        elif way == "row":
            module.forward = _Row(module, module.forward, self._leave_partial)
        elif way == "vocab_embedding":
            module.forward = _Embedding(module, module.forward, self._rank, self._leave_partial)
        else:
            module.forward = _Local(module, module.forward)
        if way == "vocab_head":
            self._split_head(module)

    def _split_head(self, head: nn.Module) -> None:
        rows = local_part(next(head.parameters())).shape[0]
        if self._loss_parallel:
            head.vocab_shard = VocabShard(self._group, self._rank * rows, rows)  # type: ignore[assignment]
        else:
            head.logits = _WholeLogits(head.logits, self._group)  # type: ignore[assignment, arg-type]
        head.whole = _WholeHead(head, head.whole)  # type: ignore[assignment, arg-type]

    def _enter(self, x: Tensor) -> Tensor:
        """(B, s, D) -> (B, S, D): all positions, for modules of which each rank computes a part."""
        return all_gather(x, SEQUENCE, self._group) if self._sequence_parallel else fan_out(x, self._group)

    def _leave_partial(self, x: Tensor) -> Tensor:
        """(B, S, D), a part of a sum -> (B, s, D), the sum."""
        return reduce_scatter(x, SEQUENCE, self._group) if self._sequence_parallel else all_reduce(x, self._group)


def _distribute(parameter: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """A DTensor of this shape on the meta device. No rank speaks to another."""
    shape = list(parameter.shape)
    if isinstance(placement, Shard):
        shape[placement.dim] //= mesh.size()
    local = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
    return DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def _tie_again(model: nn.Module) -> None:
    for other, name in ties(model).items():  # type: ignore[arg-type]
        module, _, key = other.rpartition(".")
        setattr(model.get_submodule(module), key, model.get_parameter(name))


@contextmanager
def local_parameters(*modules: nn.Module) -> Iterator[None]:
    """Within this context, this rank's parts stand in for the modules' own parameters, connected to them."""
    held = [(module, dict(module._parameters)) for module in modules]
    for module, parameters in held:
        for key, parameter in parameters.items():
            if isinstance(parameter, DTensor):  # else a context around this one has done it
                module._parameters[key] = _connected(parameter)  # type: ignore[assignment]
    try:
        yield
    finally:
        for module, parameters in held:
            module._parameters.update(parameters)


def _connected(parameter: Any) -> Tensor:
    """Its gradient is taken as it comes, even where it is a part of a sum: `complete_gradients` sees to that."""
    return parameter.to_local(grad_placements=parameter.placements)


@frozen
class _Local:
    """Computes with this rank's parts of the parameters."""

    module: nn.Module
    forward: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with local_parameters(self.module):
            return self.forward(*args, **kwargs)


@frozen
class _Gathered:
    """Gives a module its first argument whole."""

    forward: Callable[..., Any]
    enter: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.forward(self.enter(x), *args, **kwargs)


@frozen
class _Summed:
    """Adds up what a module gives on each rank."""

    forward: Callable[..., Tensor]
    leave: Callable[[Tensor], Tensor]

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.leave(self.forward(*args, **kwargs))


@frozen
class _Row:
    """x Wᵀ with this rank's columns of W, summed over ranks; then the bias, once."""

    module: nn.Module
    forward: Callable[..., Any]
    leave: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        with local_parameters(self.module):
            bias = getattr(self.module, "bias", None)
            if bias is None:
                return self.leave(self.forward(x))
            self.module._parameters["bias"] = None
            return self.leave(self.forward(x)) + bias.to(x.dtype)


@frozen
class _Embedding:
    """Looks up the ids that lie in this rank's rows; others are zero, and the sum over ranks has all."""

    module: nn.Module
    forward: Callable[..., Any]
    rank: int
    leave: Callable[[Tensor], Tensor]

    def __call__(self, ids: Tensor) -> Tensor:
        with local_parameters(self.module):
            rows = self.module.weight.shape[0]
            index = ids - self.rank * rows  # type: ignore[operator]
            inside = (index >= 0) & (index < rows)
            found = self.forward(index.where(inside, 0))
            return self.leave(found * inside.unsqueeze(-1))


@frozen
class _WholeHead:
    """`Head.whole` with this rank's rows."""

    head: nn.Module
    whole: Callable[..., Any]

    @contextmanager
    def __call__(self, dtype: torch.dtype | None = None) -> Iterator[Sequence[Tensor]]:
        with local_parameters(self.head), self.whole(dtype) as weights:
            yield weights


@frozen
class _WholeLogits:
    """`Head.logits` of the whole vocabulary."""

    logits: Callable[[Tensor], Tensor]
    group: dist.ProcessGroup

    def __call__(self, hidden: Tensor) -> Tensor:
        return gather_equal(self.logits(hidden), -1, self.group)


@frozen
class _Finish:
    """`Model.finish` with all positions, for the head, of which each rank computes a part."""

    finish: Callable[[Carry, Batch], Tensor]
    enter: Callable[[Tensor], Tensor]

    def __call__(self, carry: Carry, batch: Batch) -> Tensor:
        return self.enter(self.finish(carry, batch))
