"""What the component `fsdp` builds."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
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
from torch.distributed.pipelining import PipelineStage

from forge_core.contracts.model import Generates, HasFSDPUnits
from forge_core.contracts.parameters import NamedParameters
from forge_core.contracts.runtime import ParallelStage
from forge_core.parallel.mesh import all_reduce_tokens
from forge_core.parallel.reduce import sum_gradients
from forge_kit.blocks import further_blocks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.model import Model
    from forge_plugin_parallel.fsdp import FSDP


class FSDPStage(ParallelStage):
    """See `forge_core.contracts.runtime.ParallelStage`.

    The root unit has what no other has, and always the head: a loss uses the head's weights without a forward pass
    that could gather them, and the root stays gathered from the model's forward pass to its backward.
    """

    def __init__(self, component: FSDP, context: BuildContext) -> None:
        self._component = component
        self._reshards, self._pipelined = component.reshards(context.layout), context.layout.pp > 1
        self._mesh = data_mesh(context)
        self._narrow = context.job.optimizer.parameter_dtype == "bf16"
        self._precision = _precision(context.dtype, self._narrow)
        self._context_mesh = context.mesh
        self._offload = OffloadPolicy()
        self._owns_gradients = False
        self._units: list[FSDPModule] = []
        self._whole: Sequence[str] = ()
        """Names of parameters that are not sharded. They get other objects with their memory, so not the objects."""
        if component.offload:
            self._offload = CPUOffloadPolicy(pin_memory=context.device.type == "cuda")
            self.parameter_device = torch.device("cpu")

    def apply(self, model: Model) -> Model:
        """Shard the units of `model`, then what is left of it."""
        assert isinstance(model, nn.Module)
        self._whole = self._routers(model)
        self._ignored = {model.get_parameter(name) for name in self._whole}
        apart = [self._shard([module], self._reshards, mesh) for module, mesh in _with_own_ranks(model)]
        units = [self._shard(modules, self._reshards) for modules in inner_units(model)]
        root = self._shard([model], reshard_after_forward=False)
        self._units = [*apart, *units, root]
        for unit in self._units:
            # Gradients are already divided by the tokens of the global batch: what is left to do is to add them up.
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_gradient_divide_factor(1.0)
        _prefetch(units, set(further_blocks(model)), self._component.prefetch)
        if isinstance(model, Generates):
            register_fsdp_forward_method(model, "decode")
        return model

    def describe(self) -> str:
        """Over how many ranks parameters are split, and where they are."""
        host = "; they, gradients and optimizer state on the host" if self._component.offload else ""
        return f"parameters split over {self._mesh.shape[-1]} ranks{host}"

    @contextmanager
    def micro_batch(self, model: Model, *, backward: bool, last: bool) -> Iterator[None]:
        """Without a backward pass, nobody else would free the root, nor units that stay gathered after a forward pass;
        weights that change meanwhile would go unseen."""
        assert isinstance(model, FSDPModule)
        if not self._owns_gradients:
            _own_gradients(model)
            self._owns_gradients = True
        if backward:
            model.set_requires_gradient_sync(last or self._component.reduce_every_micro_batch)
            model.set_is_last_backward(last)
            model.set_reshard_after_backward(self._reshards or not self._pipelined)
        yield
        if not backward:
            for unit in self._units:
                unit.reshard()

    def complete_gradients(self, model: Model) -> None:
        """Sum what stayed whole; reduce what the micro-batches of a pipeline added up, and free what they gathered."""
        if self._whole:
            assert isinstance(model, nn.Module)
            whole = [model.get_parameter(name) for name in self._whole]
            sum_gradients(whole, lambda flat: all_reduce_tokens(flat, self._context_mesh))
        if self._pipelined:
            PipelineStage.perform_reduce_grad(SimpleNamespace(submod=model), grad_scale_factor=1)  # type: ignore[arg-type]

    def _routers(self, model: Any) -> list[str]:
        """Weights of routers, where gathering would round them: experts are chosen by float32 scores, and with rounded
        weights other ones than in one process. They are small, and stay whole on every rank.

        Offloaded parameters are on the host from one use to the next, so with `offload` these are gathered too.
        """
        if self._precision.param_dtype is None or self._narrow or self._component.offload:
            return []
        return [item.name for item in NamedParameters.of(model) if item.role == "router"]

    def _shard(
        self, modules: list[nn.Module], reshard_after_forward: bool, mesh: DeviceMesh | None = None
    ) -> FSDPModule:
        """One unit; gives its first module, which stands for it."""
        fully_shard(
            modules,
            mesh=mesh or self._mesh,
            mp_policy=self._precision,
            offload_policy=self._offload,
            reshard_after_forward=reshard_after_forward,
            ignored_params=self._ignored or None,
        )
        assert isinstance(modules[0], FSDPModule)
        return modules[0]


def data_mesh(context: BuildContext) -> DeviceMesh:
    """The mesh that parameters are sharded on.

    Returns:
        A mesh whose last dimension has all ranks with different tokens (`shard` x `cp`) but the copies along
        `replicate`, which are a dimension before it if there are several.
    """
    mesh, layout = context.mesh, context.layout
    assert mesh is not None
    names = [dimension.name for dimension, size in layout.sizes if dimension.divides_tokens and size > 1]
    names = [name for name in names if name != "replicate"] or ["shard"]
    name = "_".join(names)
    flat = mesh[name] if len(names) == 1 else mesh[tuple(names)]._flatten(name)
    return mesh["replicate", name] if layout.replicate > 1 else flat


def inner_units(model: nn.Module) -> list[list[nn.Module]]:
    """The units of `fsdp_units`, but for that of the head. Of a model without them: each layer."""
    if isinstance(model, HasFSDPUnits):
        units = [[model.get_submodule(name) for name in names] for names in model.fsdp_units()]
    else:
        units = [[layer] for layer in model.layers.values()]  # type: ignore[union-attr, operator]
    units = [[module for module in unit if next(module.parameters(), None) is not None] for unit in units]
    head = set(model.head.modules())  # type: ignore[union-attr, operator]
    return [unit for unit in units if unit and head.isdisjoint(unit)]


def _with_own_ranks(model: nn.Module) -> list[tuple[nn.Module, DeviceMesh]]:
    """Modules on fewer data ranks than the rest, with the mesh that a stage before has left them (experts)."""
    return [(module, vars(module)["data_mesh"]) for module in model.modules() if "data_mesh" in vars(module)]


def _prefetch(units: Sequence[FSDPModule], further: Container[FSDPModule | nn.Module], ahead: int) -> None:
    """Further blocks only train, so no layer gathers them ahead: in an evaluation that would be left over, and the next
    step would take it for what the weights are then."""
    if not ahead:
        return
    for number, unit in enumerate(units):
        after = units[number + 1 : number + 1 + ahead]
        unit.set_modules_to_forward_prefetch([other for other in after if unit in further or other not in further])
        unit.set_modules_to_backward_prefetch(list(reversed(units[max(0, number - ahead) : number])))


def _own_gradients(model: Any) -> None:
    """torch adds up in float32 what it has not reduced yet, and then keeps gradients in the dtype of parameters."""
    for parameter in model.parameters():
        parameter.grad_dtype = parameter.dtype


def _precision(dtype: torch.dtype, narrow: bool) -> MixedPrecisionPolicy:
    """Parameters are gathered in the narrower of the dtype they are kept in (`narrow`: bfloat16) and the compute dtype.
    Gradients are reduced in float32 or wider."""
    wide = torch.promote_types(dtype, torch.float32)
    gathered = torch.bfloat16 if narrow else dtype
    if gathered == wide:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=wide, cast_forward_inputs=False)
