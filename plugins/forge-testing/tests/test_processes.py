"""Functions on several ranks: what a forked process may do after what its parent did."""

from __future__ import annotations

import faulthandler

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from forge_testing.processes import run_on_ranks


def gradient(rank):
    weight = torch.ones(1, requires_grad=True)
    (weight * 3).sum().backward()
    return weight.grad.item()


def test_ranks_run_backward_passes_after_fake_tensors_and_a_backward_pass():
    """A CUDA build of torch without a GPU has a device from the first fake tensor on, and autograd a thread for it."""
    with FakeTensorMode():
        torch.ones(1)
    gradient(0)
    assert run_on_ranks(1, gradient) == [3.0]


def test_ranks_start_in_a_process_that_has_a_timer_of_its_own():
    """That of pytest's `faulthandler_timeout` is a thread, for which ranks would wait for good."""
    faulthandler.dump_traceback_later(100)
    assert run_on_ranks(1, lambda rank: rank, timeout=60) == [0]
