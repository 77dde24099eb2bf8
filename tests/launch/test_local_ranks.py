"""`forge-run job.toml --nproc 2`, as a user runs it: output, logs, failures, hangs, signals."""

from __future__ import annotations

import os
import signal
import socket
import time

import forked_starts
import pytest

from forge_core.checkpoint.run_folder import RunFolder
from forge_core.contracts.phase import Phase
from forge_core.contracts.run_end import Cause
from forge_testing.refusals import lacks

from .conftest import alive, children, wait_for_step, wait_until

pytestmark = pytest.mark.slow


def test_two_ranks_train_and_only_the_first_speaks(job):
    """A thread that is inside torch at the end does not abort a rank either, which a fork would not show."""
    trouble = job.trouble("linger", step=0)
    code, out, err = job.finish(job.start("--nproc", "2", *trouble, **{forked_starts.REAL: "1"}))
    assert (code, err) == (0, "")
    assert (job.folder / "took-leave").exists()
    assert "replicate 2" in out
    assert out.count("step 6/6") == 2, "the step and its evaluation, once"
    assert out.rstrip().endswith("runs/tiny")
    assert job.steps_saved() == [2, 4, 6]
    assert sorted(path.name for path in (job.run / "logs").iterdir()) == ["rank-0.log", "rank-1.log"]


def test_a_bad_job_starts_no_rank_and_creates_nothing(job):
    before = sorted(job.folder.rglob("*"))
    code, out, err = job.finish(job.start("--nproc=3", "--model.dims=3"))
    assert (code, out) == (2, "")
    layout, key = sorted(err.splitlines(), reverse=True)
    assert not lacks(layout, "train.global_batch_size: 4", "3 data-parallel ranks")
    assert key.startswith("--model.dims=3: model.dims: ")
    assert not lacks(key, "'dim'")
    assert sorted(job.folder.rglob("*")) == before


def test_the_error_of_one_rank_is_shown_first_and_ends_all(job):
    process = job.start("--nproc", "2", *job.trouble("raise"))
    wait_for_step(process, 3)
    code, _, err = job.finish(process)
    assert code == 1
    first, *traceback, logs = err.splitlines()
    assert first == "forge-run: rank 1 failed:"
    assert traceback[-2:] == ["ValueError: the flux is out of bounds", "in hook hooks.trouble, on_step_begin"]
    assert logs.endswith(": runs/tiny/logs")
    assert "ValueError: the flux is out of bounds" in job.log(1)
    assert "ValueError" not in job.log(0)
    assert job.steps_saved() == [2]
    end = RunFolder(job.run).end()
    assert (end.cause, end.rank, end.step) == (Cause.FAILED, 1, 2)
    assert "ValueError: the flux is out of bounds" in end.reason
    code, out, err = job.finish(job.start("--nproc", "2", *job.trouble("raise")))
    assert (code, err) == (0, "")
    assert "checkpoints/step-2" in out


@pytest.mark.parametrize(
    ("what", "facts"),
    [
        ("SIGKILL", ["rank 1", "SIGKILL", "memory"]),
        ("leave", ["rank 1", "exit code 7"]),
    ],
)
def test_a_rank_that_is_lost_is_the_one_that_is_told_of(job, what, facts):
    code, _, err = job.finish(job.start("--nproc", "2", *job.trouble(what)))
    assert code == 1
    line = err.splitlines()[0].removeprefix("forge-run: ")
    assert not lacks(line, *facts)
    assert job.steps_saved() == [2]
    end = RunFolder(job.run).end()
    assert (end.code, end.cause, end.rank) == (1, Cause.KILLED, 1)
    assert line.startswith(end.reason)


STEPS = ("--train.steps=500", "--checkpoint.interval=0")


def test_a_hang_ends_and_tells_which_rank_is_late_and_where(job):
    process = job.start("--nproc", "2", "--launch.hang_timeout_s=20", *job.trouble("hang"))
    wait_for_step(process, 3)
    code, _, err = job.finish(process)
    assert code == 1
    lines = err.splitlines()
    assert lines[0].startswith("forge-run: ")
    assert not lacks(lines[0], "launch.hang_timeout_s = 20 s")
    assert not lacks(
        lines[1], f"rank 1 on {socket.gethostname()}", "late", "step 3", "hook hooks.trouble, on_step_begin"
    )
    assert "trouble.py" in lines[2]
    assert f"rank 0: step 3, {Phase.FORWARD_BACKWARD}" in lines[3]
    assert not lacks(lines[3], "waiting")
    assert "in go_wrong" in job.log(1), "its stacks"
    assert job.steps_saved() == [2]


@pytest.mark.parametrize("what", ["work", "slow save"])
def test_work_that_moves_is_no_hang_however_long_it_takes(job, what):
    began = time.monotonic()
    limit = "--launch.hang_timeout_s=15"
    code, _, err = job.finish(job.start("--nproc", "2", limit, "--checkpoint.interval=0", *job.trouble(what, rank=0)))
    assert (code, err) == (0, "")
    assert time.monotonic() - began > 20


@pytest.mark.parametrize(
    ("to", "number"), [("launcher", signal.SIGUSR1), ("rank", signal.SIGTERM), ("all", signal.SIGINT)]
)
def test_a_signal_saves_once_and_ends_with_75(job, to, number):
    process = job.start("--nproc", "2", *STEPS, *job.trouble(pause_s=0.05))
    wait_for_step(process, 2)
    ranks = children(process)
    assert len(ranks) == 2
    for target in {"launcher": [process.pid], "rank": ranks[1:], "all": [*ranks, process.pid]}[to]:
        os.kill(target, number)
    code, out, err = job.finish(process)
    assert (code, err) == (75, "")
    [step] = job.steps_saved()
    reason = f"signal {number.name}" + (" (rank 1)" if to == "rank" else "")
    assert not lacks(out, f"step {step} ({reason})")


def test_a_second_signal_ends_all_at_once_even_in_a_hang(job):
    process = job.start("--nproc", "2", *job.trouble("hang"))
    wait_for_step(process, 3)
    ranks = children(process)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)  # an echo
    time.sleep(1.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert job.finish(process)[0] == 130
    assert not any(alive(rank) for rank in ranks)


def test_ranks_do_not_outlive_a_killed_launcher(job):
    process = job.start("--nproc", "2", *STEPS, *job.trouble(pause_s=0.05))
    wait_for_step(process, 2)
    ranks = children(process)
    process.kill()
    assert wait_until(lambda: not any(alive(rank) for rank in ranks))


def test_ranks_that_do_not_stop_are_killed_after_the_grace_period(job):
    process = job.start("--nproc", "2", "--launch.grace_s=2", *job.trouble("hang"))
    wait_for_step(process, 3)
    process.send_signal(signal.SIGTERM)
    code, _, err = job.finish(process)
    assert code == 1
    assert not lacks(err, "rank 0, 1", "launch.grace_s = 2 s")
