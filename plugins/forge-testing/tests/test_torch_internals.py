"""The private names of torch that the tools of tests use: the test names one that another torch has changed."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from forge_testing.pretend import NAME, on_device
from forge_testing.processes import run_on_ranks


def threads_of_new_groups(rank):
    """How many threads twenty groups of both ranks add, which reduce as any does."""
    groups = [dist.new_group([0, 1])]
    before = len(list(Path("/proc/self/task").iterdir()))
    groups += [dist.new_group([0, 1]) for _ in range(20)]
    for group in groups:
        dist.all_reduce(total := torch.tensor([1.0 + rank]), group=group)
        assert total.item() == 3
    return len(list(Path("/proc/self/task").iterdir())) - before


def test_groups_of_ranks_share_the_thread_of_a_device():
    assert run_on_ranks(2, threads_of_new_groups) == [40, 40]  # two workers each, and no poller


def test_no_stack_is_recorded():
    assert FakeTensorMode()._stack_trace == []
    if not torch.cuda.is_initialized():
        torch.manual_seed(0)
        assert [stack for _, stack in filter(None, torch.cuda._lazy_seed_tracker.get_calls())] == [[]]


def test_the_pretended_device_finds_what_it_needs_of_torch():
    assert on_device(of_the_device) == [2.0, 4.0]


def of_the_device():
    x = torch.arange(4.0, device=NAME).requires_grad_()  # made by an operator that changes the shape of its result
    x.sum().backward()
    assert torch.randn(2, device=NAME, generator=torch.Generator(NAME).manual_seed(0)).shape == (2,)
    assert x.detach().unsqueeze_(0).shape == (1, 4)
    sent = torch.tensor([1.0, 2.0], pin_memory=True).to(NAME, non_blocking=True)
    return (sent * 2).tolist()
