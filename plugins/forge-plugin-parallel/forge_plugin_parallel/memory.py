"""Memory of training, counted before there is any: on fake tensors, which have shapes and no content.

What a function keeps or takes is counted by the storages that the operations inside it make, so views and tensors that
are saved twice count once, parameters and other inputs count nothing, and what recomputation forgets is not counted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from forge_core.contracts.parameters import NamedParameter, NamedParameters
from forge_core.parallel.mesh import local_part

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.model import Model

Bytes = int


class Allocations(TorchDispatchMode):
    """Counts the bytes that operations within this context allocate and that are still there.

    Shapes only: `present` and `peak` are what an allocator without rounding would hold.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak: Bytes = 0
        self._storages: dict[StorageWeakRef, Bytes] = {}

    @property
    def present(self) -> Bytes:
        """Of what was allocated, the bytes that something still refers to."""
        self._storages = {storage: size for storage, size in self._storages.items() if not storage.expired()}
        return sum(self._storages.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {StorageWeakRef(tensor.untyped_storage()) for tensor in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = StorageWeakRef(tensor.untyped_storage())
            if storage not in known:  # a view, or changed in place
                self._storages.setdefault(storage, tensor.untyped_storage().nbytes())
        self.peak = max(self.peak, self.present)
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def kept_bytes(function: Callable[[], Any]) -> Bytes:
    """What is still allocated after `function`, as long as its result lives: of a forward pass, its result and what it
    keeps for the backward pass. Parameters, and what else was there before, count nothing."""
    with Allocations() as allocations:
        result = function()
        present = allocations.present
    del result
    return present


def peak_bytes(function: Callable[[], Any]) -> Bytes:
    """The most that is allocated at one time while `function` runs."""
    with Allocations() as allocations:
        function()
    return allocations.peak


@contextmanager
def stand_ins(model: Model, device: torch.device, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Within this context, the model computes shapes: fake tensors on `device` stand in for what it has on the meta
    device, this rank's part of what is split over ranks, and collectives send nothing.

    Args:
        dtype: of parameters; None: their own. With the compute dtype, as after a gathering by fsdp,
            nothing is kept of their casts.
    """
    assert isinstance(model, nn.Module)
    held = [(module, dict(module._parameters), dict(module._buffers)) for module in model.modules()]
    made: dict[int, Any] = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        try:
            for module, parameters, buffers in held:
                for key, parameter in parameters.items():
                    if parameter is not None and id(parameter) not in made:
                        made[id(parameter)] = _fake(parameter, device, dtype)
                    module._parameters[key] = made.get(id(parameter))
                for key, buffer in buffers.items():
                    if buffer is not None:
                        module._buffers[key] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
            yield
        finally:
            for module, parameters, buffers in held:
                module._parameters.update(parameters)
                module._buffers.update(buffers)


def optimizer_bytes(model: Model, context: BuildContext) -> Bytes:
    """State that the job's optimizer keeps for a rank's parameters: a step is made on shapes.

    Sharding that is still to come, as by fsdp, divides it.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        parts = [
            NamedParameter(item.name, _fake(item.parameter, context.device, None), item.role)
            for item in NamedParameters.of(model)
        ]
        optimizer = context.build(context.job.optimizer, parameters=NamedParameters(parts))
        for part in parts:
            part.parameter.grad = torch.empty_like(part.parameter) if part.parameter.requires_grad else None
        optimizer.step()
    return sum(t.untyped_storage().nbytes() for state in optimizer.state.values() for t in _tensors(state))


def _fake(parameter: nn.Parameter, device: torch.device, dtype: torch.dtype | None) -> nn.Parameter:
    """Of the shape of this rank's part; within a mode that makes fake tensors."""
    local = local_part(parameter)
    return nn.Parameter(torch.empty(local.shape, dtype=dtype or local.dtype, device=device), parameter.requires_grad)


def parameter_bytes(model: Model) -> Bytes:
    """This rank's parameters, as they are now; tied ones once."""
    return sum(local_part(parameter).numel() * parameter.element_size() for parameter in model.parameters())


def gradient_bytes(model: Model) -> Bytes:
    """Gradients of this rank's parameters while they add up: in float32 or wider, whatever parameters are kept in."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return sum(local_part(p).numel() * torch.promote_types(p.dtype, torch.float32).itemsize for p in trained)


# --- what there is -----------------------------------------------------------------------------------------------


def device_memory(device: torch.device) -> Bytes:
    """What a rank can still allocate on its device. Of a host, the share of one of its ranks."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return host_memory() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def host_memory(root: Path = Path("/")) -> Bytes:
    """What the host can still give, within the limit of this process's control group (of containers and SLURM)."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return min([free, *_group_limits(root)])


def _group_limits(root: Path) -> Iterator[Bytes]:
    """What control groups leave, of both versions, where they limit anything."""
    names = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
    for limit, used in names:
        try:
            found = (root / "sys/fs/cgroup" / limit).read_text().strip()
            if found != "max":
                yield max(0, int(found) - int((root / "sys/fs/cgroup" / used).read_text()))
        except OSError:
            continue
