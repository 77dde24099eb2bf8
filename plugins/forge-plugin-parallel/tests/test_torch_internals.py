"""The private names of torch that the parallel stages use: each test names one that another torch has changed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

from forge_plugin_parallel import torch_internals


def test_slow_operators_are_overloads_that_a_policy_is_asked_about():
    assert len(torch_internals.SLOW_OPERATORS) == 6
    assert all(isinstance(each, torch._ops.OpOverload) for each in torch_internals.SLOW_OPERATORS)


def test_views_are_known():
    whole = torch.zeros(4)
    assert (torch_internals.is_view(whole[:2]), torch_internals.is_view(whole)) == (True, False)


def test_pipeline_stages_have_the_methods_that_ours_overrides():
    names = set(vars(torch_internals.Stage)) - {"_on_meta", "_sent", "__module__", "__doc__", "__abstractmethods__"}
    names -= {"_abc_impl", "__static_attributes__", "__firstlineno__"}
    names -= {"_validate_fwd_outputs"}  # of torch 2.11 and older
    assert "_prepare_forward_infra" in names
    assert "_prepare_backward_infra" in names
    assert [name for name in sorted(names) if not hasattr(pipelining.PipelineStage, name)] == []


def test_a_stage_lists_what_it_receives_by_micro_batch():
    if dist.is_initialized():  # by an earlier test in this process
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        number = torch.zeros(1, dtype=torch.long, device="meta")
        carry = torch.empty(1, 2, device="meta", requires_grad=True)
        stage = torch_internals.Stage(
            nn.Linear(2, 2),
            0,
            2,
            torch.device("cpu"),
            input_args=(number,),
            output_args=(carry,),
            group=dist.group.WORLD,
        )
        assert (stage.args_recv_info, stage.grad_recv_info, stage.bwd_cache) == ({}, {}, {})
        assert stage.device == torch.device("cpu")
    finally:
        dist.destroy_process_group()
