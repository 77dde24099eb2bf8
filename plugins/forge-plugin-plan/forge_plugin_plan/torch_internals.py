"""Everything private to torch that a planned step uses, beside `forge_kit.torch_internals`.

`tests/test_torch_internals.py` names the one that another torch has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.tensor._sharding_prop import ShardingPropagator

# The store of the backend "fake", whose collectives send nothing.
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_flatten, tree_unflatten

from forge_kit.torch_internals import FakeTensor, FakeTensorMode

__all__ = [
    "FakeStore",
    "QuickFakeTensorMode",
    "around_questions_of_dtensors",
    "backward_pass",
    "forget_sharding",
    "group_named",
    "hook_gradient_first",
    "identity_of",
    "schema_of",
    "tree_flatten",
    "tree_unflatten",
    "without_vote",
]


_PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))


class QuickFakeTensorMode(FakeTensorMode):
    """A FakeTensorMode that finds operations in its cache sooner.

    To make the key of an operation, torch flattens 17 attributes of each tensor by `dataclasses.fields`: a third of all
    time. Here the key has those in which plain tensors may differ, in one tuple; what is not plain is left to torch.

    It needs of torch that `_prep_args_for_hash` appends to `result` what identifies `args`.
    """

    def _prep_args_for_hash(self, result: list[object], args: Any, *further: Any) -> None:
        original: Any = super()
        if type(args) is dict:
            original._prep_args_for_hash(result, args, *further)
            return
        result.append((type(args), len(args)))
        for arg in args:
            kind = type(arg)
            if kind in _PLAIN:
                result.append((kind, arg))
            elif kind is FakeTensor and _plain(arg, self):
                result.append(_identity(arg))
            elif kind is list or kind is tuple:
                self._prep_args_for_hash(result, arg, *further)
            else:
                original._prep_args_for_hash(result, (arg,), *further)


def _plain(tensor: FakeTensor, mode: FakeTensorMode) -> bool:
    fake: Any = tensor
    return (
        fake.fake_mode is mode
        and fake.constant is None
        and fake.layout is torch.strided
        and not fake._has_symbolic_sizes_strides
        and not fake.is_quantized
    )


def _identity(tensor: FakeTensor) -> tuple[object, ...]:
    return (
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.untyped_storage().nbytes(),
        tensor.dtype,
        tensor.fake_device,
        tensor.requires_grad,
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.is_inference(),
    )


def identity_of(storage: torch.UntypedStorage) -> int:
    """Returns what stays the same for a storage until it is freed: Python's objects for it come and go."""
    return storage._cdata


def backward_pass() -> int:
    """Returns the number of the backward pass that is running; -1: none."""
    return torch._C._current_graph_task_id()


def schema_of(operator: Any) -> Any:
    """Returns the signature of an operator of the dispatcher, which says what it overwrites."""
    return operator._schema


def group_named(name: str) -> dist.ProcessGroup:
    """Returns the process group that functional collectives know by its name."""
    resolve: Any = distributed_c10d
    return resolve._resolve_process_group(name)


def hook_gradient_first(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Call `hook` with the gradient of a tensor, before all other hooks of the tensor."""
    handle = tensor.register_hook(hook)
    # Python's hooks of a tensor run in the order in which they were put into this dictionary, whose `move_to_end` the
    # engine does not see; fsdp registers some during the forward pass.
    hooks: Any = tensor._backward_hooks
    for key in [key for key in hooks if key != handle.id]:
        hooks[key] = hooks.pop(key)


def around_questions_of_dtensors(ask: Callable[[Callable[[], Any]], Any]) -> AbstractContextManager[Any]:
    """A context in which `ask` calls what DTensors compute on fake tensors to find out a shape."""
    original: Any = ShardingPropagator._propagate_tensor_meta_non_cached

    def asked(propagator: Any, schema: Any) -> Any:
        return ask(lambda: original(propagator, schema))

    return patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", asked)


def forget_sharding() -> None:
    """Clear DTensor's caches of shardings: they hold on to meshes, which another world's equal."""
    from torch.distributed.tensor import DTensor

    dispatcher: Any = DTensor._op_dispatcher
    native: Any = torch._C
    try:
        dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
        native._clear_DTensor_sharding_propagator_cache()
    except AttributeError:  # in another version of torch; importing its function takes a second
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


def without_vote() -> AbstractContextManager[Any]:
    """A context in which torch's pipelines take for granted that all stages know the shapes they receive and send."""
    # Since 2.13, torch's pipelines vote before their first step on whether all stages know the shapes that they receive
    # and send. Nobody answers here. The stages of a job must know them, or the step fails.
    from torch.distributed.pipelining import schedules

    here: Any = schedules
    base: Any = here._PipelineSchedule
    if not hasattr(base, "_warmup_p2p"):
        return nullcontext()

    def agree(schedule: Any, stages: Sequence[Any], has_backward: bool, p2p_done: bool) -> None:
        del schedule, has_backward, p2p_done
        for stage in stages:
            stage._inference_mode = here.InferenceMode.STATIC

    return patch.object(base, "_warmup_p2p", agree)
