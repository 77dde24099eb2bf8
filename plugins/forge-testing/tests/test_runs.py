"""Whole tensors of all ranks, from one message."""

from __future__ import annotations

import torch
from torch.distributed.tensor import Shard, distribute_tensor

from forge_core.parallel.mesh import mesh_of
from forge_testing.processes import run_on_ranks
from forge_testing.runs import whole_tensors

SHARDED = torch.arange(10.0).view(5, 2)


def gathered(rank):
    mesh = mesh_of({"shard": 2}, "cpu")
    tensors = {
        "sharded": distribute_tensor(SHARDED, mesh["shard"], [Shard(0)]),
        "codes": torch.tensor([3, 250], dtype=torch.uint8),
        "different": torch.tensor([1.0, float(rank)], dtype=torch.bfloat16),
        f"stage {rank}": torch.ones(1),
    }
    return whole_tensors(tensors, mesh)


def test_parts_are_joined_on_every_rank():
    for tensors in run_on_ranks(2, gathered):
        assert [*tensors] == ["sharded", "codes", "different", "stage 0", "stage 1"]
        assert torch.equal(tensors["sharded"], SHARDED)
        assert torch.equal(tensors["codes"], torch.tensor([3.0, 250.0], dtype=torch.float64))
        assert torch.equal(tensors["different"], torch.tensor([1.0, torch.inf], dtype=torch.bfloat16))


def test_one_process_has_copies():
    weight = torch.ones(2, requires_grad=True)
    copy = whole_tensors({"weight": weight}, None)["weight"]
    copy.zero_()
    assert weight.tolist() == [1, 1]
    assert not copy.requires_grad
