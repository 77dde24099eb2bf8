"""Ranks that torchrun, or anybody else, starts: they find each other, agree on the job, and end together."""

from __future__ import annotations

import signal
import socket
import sys

import pytest

from forge_testing.refusals import lacks

from .conftest import wait_for_step

pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_ranks(job, *arguments_of_ranks):
    """One process a rank, as srun would start them on machines of their own."""
    port, size = str(free_port()), str(len(arguments_of_ranks))
    shared = {"WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_WORLD_SIZE": "1"}
    return [
        job.start(*arguments, **shared, RANK=str(rank), LOCAL_RANK="0")
        for rank, arguments in enumerate(arguments_of_ranks)
    ]


def test_ranks_of_different_jobs_all_end_with_2_and_the_difference(job):
    other = (*job.trouble(), "--optimizer.lr=0.5")
    first, second = start_ranks(job, ("--train.steps=7",), other)
    code, out, err = job.finish(first)
    assert code == 2
    assert "step" not in out
    lines = err.splitlines()
    assert not lacks(lines[0], "rank 0")
    host = socket.gethostname()
    assert f"  rank 1 on {host}: train.steps: 7 -> 6" in lines
    assert f"  rank 1 on {host}: optimizer.lr: 0.01 -> 0.5" in lines
    assert any(line.startswith(f"  rank 1 on {host}: hooks.trouble.type: ") for line in lines)
    assert any("trouble.py: absent -> SHA-256 " in line for line in lines)
    assert job.finish(second) == (2, "", "")
    assert not job.run.exists()


def test_a_rank_that_cannot_read_its_job_ends_all_with_its_error(job):
    ranks = start_ranks(job, (), ("--optimizer.learning_rate=0.5",))
    codes, _, errors = zip(*map(job.finish, ranks), strict=True)
    assert codes == (2, 2)
    assert "--optimizer.learning_rate=0.5: optimizer.learning_rate: " in errors[1]
    assert errors[0] == ""


def test_a_rank_that_never_comes_is_named(job):
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    code, _, err = job.finish(job.start("--launch.start_timeout_s=2", **shared, RANK="0"))
    assert code == 1
    [line] = err.splitlines()
    assert line.startswith("forge-run: rank 0: ")
    assert not lacks(line, "2 ranks", 1, "launch.start_timeout_s = 2 s")


def test_a_rank_that_does_not_come_is_named_long_before_the_limit(job):
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    process = job.start("--launch.start_timeout_s=8", **shared, RANK="0")
    waiting, ended = process.communicate()[1].splitlines()
    assert process.returncode == 1
    assert waiting.startswith("warning: ")
    assert not lacks(waiting, "rank 1 of 2", "launch.start_timeout_s = 8 s")
    assert not lacks(ended, "2 ranks", 1, "launch.start_timeout_s = 8 s")


def test_torchrun_shows_the_error_of_the_failing_rank_first(job):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port", str(free_port()))
    code, out, err = job.finish(job.start(*job.trouble("raise"), launcher=torchrun))
    assert code == 1
    assert out.count("step 1/6") == 1
    assert err.startswith("forge-run: rank 1 failed:\nTraceback")
    assert "\nValueError: the flux is out of bounds\nin hook hooks.trouble" in err
    assert "Connection closed" not in err, "what it did to the other rank"
    assert job.steps_saved() == [2]


def test_without_a_launcher_a_lost_rank_ends_the_others(job):
    arguments = (*job.trouble("SIGKILL", rank=0), "--checkpoint.interval=2")
    first, second = start_ranks(job, arguments, arguments)
    assert job.finish(first)[0] == -signal.SIGKILL
    code, _, err = job.finish(second)
    assert code == 1
    assert err.startswith("forge-run: rank 1 failed:")
    assert job.steps_saved() == [2]


def test_a_signal_to_one_rank_is_agreed_on_by_all(job):
    arguments = ("--train.steps=500", "--checkpoint.interval=0", *job.trouble(pause_s=0.05))
    first, second = start_ranks(job, arguments, arguments)
    wait_for_step(first, 2)
    second.send_signal(signal.SIGUSR1)
    code, out, err = job.finish(first)
    assert (code, err) == (75, "")
    assert not lacks(out, "(signal SIGUSR1 (rank 1))")
    assert job.finish(second) == (75, "", "")
    assert len(job.steps_saved()) == 1
