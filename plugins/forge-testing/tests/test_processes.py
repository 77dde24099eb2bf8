"""Functions on several ranks: what a forked process may do after what its parent did."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from forge_testing.processes import endanger_forks, exit_code_of_fork, run_in_turn_on_ranks, run_on_ranks


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


def takes_a_while(rank):
    time.sleep(1.5)
    return rank


def test_ranks_may_take_long_in_all_but_not_in_one_function():
    """Many functions of a busy machine exceed the limit together; what they returned counts if a later one hangs."""
    done, error = run_in_turn_on_ranks(2, [takes_a_while] * 4 + [lambda rank: time.sleep(600)], timeout=5)
    assert done == [[0, 1]] * 4
    assert error


def test_a_fork_does_not_free_a_group_that_it_inherits():
    """It would wait for the group's threads, which it does not have."""
    ring = [dist.ProcessGroupGloo(dist.HashStore(), 0, 1)]
    ring.append(ring)
    held = [ring]
    del ring

    def make_garbage():
        held.clear()
        gc.collect()

    assert exit_code_of_fork(make_garbage, timeout=30) == 0


@pytest.mark.parametrize("fork", [partial(run_on_ranks, 2, gradient), partial(exit_code_of_fork, int)])
def test_a_fork_frees_nothing_that_it_inherits_before_it_runs_anything_of_ours(fork):
    def fork_in_danger():
        endanger_forks()
        fork(timeout=20)

    assert exit_code_of_fork(fork_in_danger, timeout=60) == 0


def test_a_fork_that_hangs_before_its_own_limit_begins_is_ended(monkeypatch):
    monkeypatch.setattr("forge_testing.processes.collect_own_garbage", lambda: time.sleep(600))
    with pytest.raises(AssertionError, match="timed out"):
        exit_code_of_fork(int, timeout=1)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (lambda: None, 0),
        (lambda: os._exit(7), 7),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL),
        (lambda: 1 / 0, 1),
    ],
)
def test_how_a_fork_ends_is_its_exit_code(end, code):
    assert exit_code_of_fork(end) == code
