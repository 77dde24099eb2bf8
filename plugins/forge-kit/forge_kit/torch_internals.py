"""Everything private to torch that several of Forge's plugins use: names that begin with an underscore.

A comment explains what each is needed for; `tests/test_torch_internals.py` names the one that another version of torch
has changed. Private names that only one plugin uses are in that plugin's own `torch_internals` module.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

# Tensors that have a shape and no memory, by which a step is planned: no public way to make or to recognise them.
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

# The bases of what normalises by the other samples of a batch, and of what drops out at random.
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.modules.dropout import _DropoutNd as Dropout

# Whether hooks of all modules are registered, by a tracer or a counter of operations, say.
from torch.nn.modules.module import _has_any_global_hook

# Described in torch's "Extending PyTorch", but in a module whose name is private.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from forge_core.parallel.mesh import local_part

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

__all__ = [
    "Dropout",
    "FakeTensor",
    "FakeTensorMode",
    "LocalAdamW",
    "NormBase",
    "TorchDispatchMode",
    "buffers_of",
    "children_of",
    "defer_reduction",
    "detect_fake_mode",
    "eagerly",
    "flash_on_cpu",
    "flash_on_cpu_backward",
    "flattened",
    "foreach_add",
    "foreach_add_",
    "foreach_clamp_min_",
    "foreach_copy_",
    "foreach_lerp_",
    "foreach_mul",
    "foreach_mul_",
    "foreach_sign_",
    "grouped_mm",
    "hooks_registered",
    "is_called_plainly",
    "is_compiled",
    "is_strided",
    "parameters_of",
    "part_offsets",
    "reduce_gradients",
    "to_copy",
    "tree_leaves",
    "unset_fake_temporarily",
]

# Operators of the dispatcher, which have no other name there.
to_copy = torch.ops.aten._to_copy
grouped_mm = torch.ops.aten._grouped_mm
flash_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""Attention that also returns the normaliser of each position, which the public function keeps to itself."""
flash_on_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# Operations on lists of tensors, one kernel for many, as torch's optimizers use them.
foreach_add = torch._foreach_add
foreach_add_ = torch._foreach_add_
foreach_clamp_min_ = torch._foreach_clamp_min_
foreach_copy_ = torch._foreach_copy_
foreach_lerp_ = torch._foreach_lerp_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_sign_ = torch._foreach_sign_


class LocalAdamW(torch.optim.AdamW):
    """torch's AdamW, of which each rank updates its own part of a parameter that is split over ranks.

    The result is the same, since the update of an element needs no other one. torch's own passes DTensors to its
    kernel, and finds out how the arguments of each list are split: with 300 parameters on a mesh of two dimensions,
    0.72 s of the host in the first step and 10 ms in each later one, in place of 0.01 s and 4 ms. The state is made of
    DTensors all the same, as checkpoints have it.
    """

    def _init_group(self, group: dict[str, Any], parameters: list[Any], grads: list[Any], *state: list[Any]) -> bool:
        is_complex = super()._init_group(group, parameters, grads, *state)  # which fills the lists
        for i, (parameter, grad) in enumerate(zip(parameters, grads, strict=True)):
            if local_part(parameter) is not parameter and grad.placements != parameter.placements:  # sums to be made
                grads[i] = grad.redistribute(parameter.device_mesh, parameter.placements)
        for tensors in (parameters, grads, *state):
            tensors[:] = map(local_part, tensors)
        return is_complex


def parameters_of(module: nn.Module) -> dict[str, Any]:
    """Returns the dictionary in which a module looks its own parameters up.

    `setattr` takes nothing but parameters, and stand-ins are tensors. A stage such as fsdp exchanges the values.
    """
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Returns the dictionary in which a module looks its own buffers up, those that are None included."""
    return module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Returns the dictionary in which a module looks its children up."""
    return module._modules


def is_called_plainly(module: nn.Module) -> bool:
    """Returns whether a call of the module is nothing but a call of its class's `forward`: no hook, not compiled."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    # A stage may also have put another `forward` on the instance.
    changed = hooks or module._compiled_call_impl is not None or "forward" in vars(module)
    return not (changed or _has_any_global_hook())


def hooks_registered() -> int:
    """Returns a number that grows with each hook that is registered, on whatever module."""
    return RemovableHandle.next_id


def is_compiled(model: nn.Module) -> bool:
    """Returns whether some module runs compiled: `Module.compile` leaves no public trace."""
    return any(module._compiled_call_impl is not None for module in model.modules())


def eagerly() -> AbstractContextManager[object]:
    """Compiled functions run as plain Python within.

    torch imports its compiler for that, which takes a second: not in a process that has compiled nothing.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def flattened(mesh: DeviceMesh, names: Sequence[str], joined: str) -> DeviceMesh:
    """Returns several dimensions of a mesh as one, named `joined`: torch's only way to one group of their ranks."""
    return mesh[tuple(names)]._flatten(joined)


def part_offsets(tensor: Tensor) -> tuple[int, ...]:
    """Returns where this rank's part of a tensor begins, by the arithmetic with which DTensor has split it."""
    from torch.distributed.checkpoint.planner_helpers import _create_chunk_list

    [part] = _create_chunk_list(tensor)
    return tuple(part.offsets)


def is_strided(placement: object) -> bool:
    """Returns whether a placement is of torch's kind for a dimension split twice, whose pieces are out of order."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return isinstance(placement, _StridedShard)


def defer_reduction(model: FSDPModule) -> None:
    """Leave the reduction of the next backward passes to `reduce_gradients`.

    Args:
        model: the root unit, before the first forward pass of the step. Its `set_requires_gradient_sync` is False for
            these passes, unless each is to reduce what it added.
    """
    # Public from torch 2.15 on, where `reduce_gradients` requires it. Earlier versions have no such mode.
    if hasattr(model, "set_manual_backward_finalization"):
        model.set_manual_backward_finalization(True)


def reduce_gradients(model: FSDPModule) -> None:
    """Reduce the gradients that backward passes have accumulated, wait for them, and free gathered parameters.

    Without such gradients it changes nothing, so it may be called twice.

    Args:
        model: the root unit, on which `defer_reduction` was called before these passes.
    """
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    if hasattr(model, "finalize_backward"):  # public from torch 2.15 on
        model.finalize_backward()
        return
    # Until then FSDP reduces in hooks of the last backward pass only, and nobody can say which one that is while the
    # micro-batches of a pipeline overlap. The callback of its last backward pass reduces the groups that are left.
    # torch's own pipeline stage calls it as well. Seen in 2.11 and 2.13.
    model.set_is_last_backward(True)
    state: Any = model._get_fsdp_state()
    state._root_post_backward_final_callback()
