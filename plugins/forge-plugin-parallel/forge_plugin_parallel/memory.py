"""Estimates memory of training before it is allocated, on fake tensors, which have shapes and no content.

Counts are of the storages that operations within a function allocate: views, and tensors saved twice, count once;
parameters and other inputs, and activations that recomputation frees, do not count. Sizes are in bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from forge_core.contracts.optimizer import NamedParameter, NamedParameters
from forge_core.devices import query_device
from forge_core.parallel.mesh import local_part
from forge_kit.torch_internals import FakeTensorMode, TorchDispatchMode, buffers_of, parameters_of, tree_leaves

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.model import Model

Bytes = int


class Allocations(TorchDispatchMode):
    """Counts the bytes that operations within this context allocate and that are still in use.

    Shapes only: `present` and `peak` are the bytes of an allocator without rounding and fragmentation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak: Bytes = 0
        self._storages: dict[StorageWeakRef, Bytes] = {}

    @property
    def present(self) -> Bytes:
        """Returns allocated bytes that something still refers to."""
        # Weak references: a storage counts until Python frees it, without hooks on every deletion.
        self._storages = {storage: size for storage, size in self._storages.items() if not storage.expired()}
        return sum(self._storages.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {StorageWeakRef(tensor.untyped_storage()) for tensor in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = StorageWeakRef(tensor.untyped_storage())
            if storage not in known:  # a known one: a view, or a tensor changed in place
                self._storages.setdefault(storage, tensor.untyped_storage().nbytes())
        self.peak = max(self.peak, self.present)
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def saved_bytes(function: Callable[[], Any]) -> Bytes:
    """Returns bytes still allocated after `function` while its result lives.

    For a forward pass: its result and the tensors saved for the backward pass. Tensors from before do not count.
    """
    with Allocations() as allocations:
        result = function()
        present = allocations.present
    del result  # only now: it holds the graph, and the graph the saved tensors
    return present


def peak_bytes(function: Callable[[], Any]) -> Bytes:
    """Returns the largest number of bytes allocated at one time while `function` runs."""
    with Allocations() as allocations:
        function()
    return allocations.peak


@contextmanager
def stand_ins(model: Model, device: torch.device, dtype: torch.dtype | None = None) -> Iterator[None]:
    """A context in which the model computes shapes only.

    Fake tensors on `device` replace its parameters and buffers on the meta device (this rank's part of a split one),
    and collectives send nothing.

    Args:
        model: a model on the meta device.
        device: the device that the shapes are computed for; nothing is allocated on it.
        dtype: dtype of parameters; None: their own. With the compute dtype, as gathered by fsdp, no casts are saved.
    """
    originals = [(module, dict(parameters_of(module)), dict(buffers_of(module))) for module in model.modules()]
    fakes: dict[int, Any] = {}  # by the original's id, so that tied parameters stay one
    with FakeTensorMode(allow_non_fake_inputs=True):
        try:
            for module, parameters, buffers in originals:
                for key, parameter in parameters.items():
                    if parameter is not None and id(parameter) not in fakes:
                        fakes[id(parameter)] = _fake(parameter, device, dtype)
                    parameters_of(module)[key] = fakes.get(id(parameter))
                for key, buffer in buffers.items():
                    if buffer is not None:
                        buffers_of(module)[key] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
            yield
        finally:
            for module, parameters, buffers in originals:
                parameters_of(module).update(parameters)
                buffers_of(module).update(buffers)


def optimizer_bytes(model: Model, context: BuildContext) -> Bytes:
    """Returns bytes of the optimizer's state for this rank's parameters, by one step on shapes.

    Stages that have not been applied yet, such as fsdp, divide it further.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        parts = [
            NamedParameter(item.name, _fake(item.parameter, context.device, None), item.role)
            for item in NamedParameters.of(model)
        ]
        optimizer = context.build(context.job.optimizer, parameters=NamedParameters(parts))
        for part in parts:
            part.parameter.grad = torch.empty_like(part.parameter) if part.parameter.requires_grad else None
        # The first step creates the state: no optimizer has it before
        optimizer.step()
    return sum(t.untyped_storage().nbytes() for state in optimizer.state.values() for t in _tensors(state))


def _fake(parameter: nn.Parameter, device: torch.device, dtype: torch.dtype | None) -> nn.Parameter:
    """A parameter with the shape of this rank's part; call within a `FakeTensorMode`."""
    local = local_part(parameter)
    return nn.Parameter(torch.empty(local.shape, dtype=dtype or local.dtype, device=device), parameter.requires_grad)


def parameter_bytes(model: Model) -> Bytes:
    """Returns bytes of this rank's parameters in their present split; tied ones count once."""
    return sum(local_part(parameter).numel() * parameter.element_size() for parameter in model.parameters())


def gradient_bytes(model: Model) -> Bytes:
    """Returns bytes of this rank's gradients while they accumulate: in float32 or wider, for every dtype."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return sum(local_part(p).numel() * torch.promote_types(p.dtype, torch.float32).itemsize for p in trained)


# --- available memory ---------------------------------------------------------------------------------------------


def device_memory(device: torch.device) -> Bytes:
    """Returns bytes that this rank can still allocate on its device; on a CPU, its share of the host."""
    if info := query_device(device, "mem_get_info"):
        return info[0]
    # Ranks on one host share its memory equally
    return host_memory() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def host_memory(root: Path = Path("/")) -> Bytes:
    """Returns available bytes of the host, within the limit of this process's cgroup (containers, SLURM).

    Args:
        root: directory that holds `proc` and `sys`.
    """
    lines = (root / "proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return min([free, *_group_limits(root)])


def _group_limits(root: Path) -> Iterator[Bytes]:
    """Bytes that cgroups of both versions leave, where they set a limit."""
    names = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
    for limit, used in names:
        try:
            allowed = (root / "sys/fs/cgroup" / limit).read_text().strip()
            if allowed != "max":
                yield max(0, int(allowed) - int((root / "sys/fs/cgroup" / used).read_text()))
        except OSError:  # this version of cgroups is not mounted
            continue
