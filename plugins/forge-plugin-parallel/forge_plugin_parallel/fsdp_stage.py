"""The stage of the component `fsdp`: shards parameters, gradients and optimizer state with torch's FSDP2."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from forge_core.contracts.runtime import ParallelStage
from forge_kit.nn.blocks import further_blocks
from forge_kit.nn.generation import Generates, join
from forge_kit.torch_internals import defer_reduction, flattened, reduce_gradients
from forge_plugin_parallel.generation import ShardedGeneration
from forge_plugin_parallel.torch_internals import shards_of_numbers_train

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.model import Model
    from forge_plugin_parallel.fsdp import FSDP


class FSDPStage(ParallelStage):
    """See `forge_core.contracts.runtime.ParallelStage`.

    The root unit holds all parameters of no other unit, and always the head: a loss uses the head's weights without a
    forward pass that could gather them, and the root stays gathered from the model's forward pass to its backward.
    """

    def __init__(self, component: FSDP, context: BuildContext) -> None:
        self._component = component
        self._reshards, self._pipelined = component.reshards(context.layout), context.layout.pp > 1
        self._mesh = data_mesh(context)
        self._precision = _precision(context.dtype, context.job.optimizer.parameter_dtype == "bf16")
        self._offload = OffloadPolicy()
        self._owns_gradients = False
        self._units: list[FSDPModule] = []
        if component.offload:
            self._offload = CPUOffloadPolicy(pin_memory=context.device.type != "cpu")
            self.parameter_device = torch.device("cpu")

    def apply(self, model: Model) -> Model:
        """Shard the units of `model`, then the rest as the root unit."""
        # From the inside out: `fully_shard` of a module manages all its parameters that no inner unit manages yet, so
        # experts (on their own mesh) precede the blocks around them, and blocks precede the root.
        apart = [self._shard([module], self._reshards, mesh) for module, mesh in _with_own_ranks(model)]
        units = [self._shard(modules, self._reshards) for modules in inner_units(model)]
        root = self._shard([model], reshard_after_forward=False)
        self._units = [*apart, *units, root]
        for unit in self._units:
            # The loss is divided by the tokens of the global batch already, so gradients are summed, not averaged.
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_gradient_divide_factor(1.0)
        _prefetch(units, set(further_blocks(model)), self._component.prefetch)
        # FSDP gathers around `forward` only, and generation calls `decode`.
        if isinstance(model, Generates):
            register_fsdp_forward_method(model, "decode")
            join(model, ShardedGeneration(model, self._units, self._mesh.get_group(self._mesh.ndim - 1)))
        return model

    def describe(self) -> str:
        """Returns over how many ranks parameters are split, and whether they are on the host."""
        host = "; they, gradients and optimizer state on the host" if self._component.offload else ""
        return f"parameters split over {self._mesh.shape[-1]} ranks{host}"

    @contextmanager
    def micro_batch(self, model: Model, *, backward: bool, last: bool) -> Iterator[None]:
        """Set up FSDP's hooks for one micro-batch; without a backward pass, free all units afterwards.

        Only a backward pass frees the root, and units that stay gathered after a forward pass. Left gathered,
        they would hold the weights of before the next update.
        """
        assert isinstance(model, FSDPModule)
        if not self._owns_gradients:  # here, not in `apply`: allocating memory replaces the parameters after it
            _own_gradients(model)
            self._owns_gradients = True
        if backward:
            model.set_requires_gradient_sync(last or self._component.reduce_every_micro_batch)
            model.set_is_last_backward(last)
            # In a pipeline other micro-batches are still to come: units freed now would be gathered again for each.
            model.set_reshard_after_backward(self._reshards or not self._pipelined)
            if self._pipelined:
                defer_reduction(model)
        yield
        if not backward:
            for unit in self._units:
                unit.reshard()

    def complete_gradients(self, model: Model) -> None:
        """Reduce what the micro-batches of a pipeline have added up, and free what they left gathered."""
        if self._pipelined:
            assert isinstance(model, FSDPModule)
            reduce_gradients(model)

    def _shard(
        self, modules: list[nn.Module], reshard_after_forward: bool, mesh: DeviceMesh | None = None
    ) -> FSDPModule:
        """Shard modules as one unit. Returns its first module, on which FSDP keeps the unit's state."""
        with shards_of_numbers_train():
            fully_shard(
                modules,
                mesh=mesh or self._mesh,
                mp_policy=self._precision,
                offload_policy=self._offload,
                reshard_after_forward=reshard_after_forward,
            )
        assert isinstance(modules[0], FSDPModule)
        return modules[0]


def data_mesh(context: BuildContext) -> DeviceMesh:
    """The mesh that parameters are sharded on.

    Returns:
        A mesh whose last dimension has all ranks with different tokens (`shard` x `cp`), preceded by `replicate` where
        there are several copies.
    """
    mesh, layout = context.mesh, context.layout
    assert mesh is not None
    names = [dimension.name for dimension, size in layout.sizes if dimension.divides_tokens and size > 1]
    names = [name for name in names if name != "replicate"] or ["shard"]
    # FSDP shards over one dimension; ranks with different tokens are all of shard x cp.
    name = "_".join(names)
    flat = mesh[name] if len(names) == 1 else flattened(mesh, names, name)
    return mesh["replicate", name] if layout.replicate > 1 else flat


def inner_units(model: Model) -> list[list[nn.Module]]:
    """Returns the units of the model's `fsdp_units`, without the head and without empty units."""
    units = [[model.get_submodule(name) for name in names] for names in model.fsdp_units()]
    units = [[module for module in unit if next(module.parameters(), None) is not None] for unit in units]
    head = set(model.head.modules())
    return [unit for unit in units if unit and head.isdisjoint(unit)]


def _with_own_ranks(model: nn.Module) -> list[tuple[nn.Module, DeviceMesh]]:
    """Modules sharded over fewer ranks than the rest (experts), with the mesh that an earlier stage set on them."""
    return [(module, vars(module)["data_mesh"]) for module in model.modules() if "data_mesh" in vars(module)]


def _prefetch(units: Sequence[FSDPModule], further: Container[FSDPModule | nn.Module], ahead: int) -> None:
    """Set the units that each unit gathers ahead.

    Layers do not prefetch further blocks, which only training runs: an evaluation would leave them gathered, and the
    next step would use those stale weights.
    """
    if not ahead:
        return
    for number, unit in enumerate(units):
        after = units[number + 1 : number + 1 + ahead]
        unit.set_modules_to_forward_prefetch([other for other in after if unit in further or other not in further])
        # The backward pass comes through the units in the opposite order
        unit.set_modules_to_backward_prefetch(list(reversed(units[max(0, number - ahead) : number])))


def _own_gradients(model: Any) -> None:
    """Set the dtype of gradients: FSDP accumulates unreduced ones in float32, then stores them like parameters."""
    for parameter in model.parameters():
        parameter.grad_dtype = parameter.dtype


def _precision(dtype: torch.dtype, narrow: bool) -> MixedPrecisionPolicy:
    """Returns the dtypes of gathered parameters and of reductions.

    Parameters are gathered in the parameter dtype (`narrow`: bfloat16) or the compute dtype, whichever is narrower, to
    minimise communication. Gradients are reduced in float32 or wider, so that sums are not rounded to bfloat16.
    """
    wide = torch.promote_types(dtype, torch.float32)
    gathered = torch.bfloat16 if narrow else dtype
    # Inputs are never cast: activations have the compute dtype from the embedding on
    if gathered == wide:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=wide, cast_forward_inputs=False)
