"""Private names of torch that the core uses, where `tests/test_torch_internals.py` lists them: each test names one that
another torch has changed."""

from __future__ import annotations

import inspect
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from forge_core.launch.watchdog import RECORDERS
from forge_core.parallel.initialise import _whole_copy


def test_foreach_operations_take_lists():
    """`engine/step.py` and `parallel/mesh.py`."""
    values = [torch.tensor([3.0, 4.0], dtype=torch.bfloat16), torch.tensor([2.0])]
    assert torch._foreach_norm(values, 2, torch.float32)[0].dtype == torch.float32
    torch._foreach_mul_(values, torch.tensor(2.0))
    torch._foreach_copy_(values[1:], [torch.tensor([7.0])])
    assert [value.tolist() for value in values] == [[6.0, 8.0], [7.0]]


def test_the_flight_recorder_takes_the_arguments_that_the_watchdog_gives():
    """`launch/watchdog.py`."""
    found = [getattr(torch._C._distributed_c10d, name, None) for name in RECORDERS.values()]
    assert any(found)
    assert [dump(includeCollectives=True, onlyActive=False) for dump in found if dump is not None]


def test_a_group_has_the_timeout_that_is_set(alone):
    """`parallel/mesh.py`."""
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    assert list(inspect.signature(set_timeout).parameters) == ["timeout", "group"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it would be shown at each start of ranks
        set_timeout(timedelta(seconds=77), dist.group.WORLD)
    assert dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)


def test_offsets_are_those_of_this_ranks_part(alone):
    """`checkpoint/tensors.py`."""
    mesh = init_device_mesh("cpu", (1,))
    for tensor in (distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)]), torch.zeros(4, 3)):
        [part] = _create_chunk_list(tensor)
        assert tuple(part.offsets) == (0, 0)


def test_torchs_fused_optimizers_say_that_they_mask_updates():
    """`engine/step.py`."""
    weights = [nn.Parameter(torch.zeros(1))]
    assert torch.optim.AdamW(weights, fused=True)._step_supports_amp_scaling
    assert not getattr(torch.optim.AdamW(weights, foreach=True), "_step_supports_amp_scaling", False)


def test_a_whole_copy_computes_with_parameters_and_buffers_of_its_own():
    """`parallel/initialise.py`."""
    module = nn.BatchNorm1d(2, dtype=torch.bfloat16)
    whole = _whole_copy(module, torch.device("cpu"))
    whole.weight.data.fill_(5)
    whole.running_mean.fill_(5)
    assert whole.weight.dtype == torch.float32
    assert (module.weight.tolist(), module.running_mean.tolist()) == ([1, 1], [0, 0])


@pytest.fixture
def alone():
    if dist.is_initialized():  # by an earlier test in this process
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
