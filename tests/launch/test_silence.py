"""A rank that gives no sign of life, rank 0 included, is named within seconds, and the others end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from forge_core.checkpoint.run_folder import RunFolder
from forge_core.contracts.run_end import Cause
from forge_testing.refusals import lacks

from .conftest import TIME_LIMIT_S, children, wait_for_step, wait_until
from .networks import ENTER, machines, reason_against
from .test_other_launchers import free_port, start_ranks

pytestmark = pytest.mark.slow

STEPS = ("--train.steps=100000", "--checkpoint.interval=0", "--launch.silence_timeout_s=4")


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_rank_that_is_stopped_ends_the_run_and_is_named(job, frozen):
    process = job.start("--nproc", "2", *STEPS, *job.trouble(pause_s=0.2))
    wait_for_step(process, 10)  # by then each rank has sent heartbeats
    os.kill(children(process)[frozen], signal.SIGSTOP)
    began = time.monotonic()
    code, _, err = job.finish(process)
    assert code == 1
    assert time.monotonic() - began > 3, "about the limit"
    first = err.splitlines()[0]
    assert not lacks(first, f"rank {frozen}", "respond")
    end = RunFolder(job.run).end()
    assert (end.code, end.cause, end.rank) == (1, Cause.SILENT, frozen)


@pytest.mark.parametrize("frozen", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_rank_that_is_stopped_after_the_last_step_is_found(job, frozen):
    keys = ("--launch.silence_timeout_s=4", *job.trouble("SIGSTOP", rank=frozen, step=0, pause_s=0.5))
    code, _, err = job.finish(job.start("--nproc", "2", *keys))
    assert code == 1
    assert not lacks(err.splitlines()[0], f"rank {frozen}", "respond")


@pytest.mark.parametrize("frozen", [2, pytest.param(0, marks=pytest.mark.thorough)])
def test_of_three_plain_processes_the_one_that_is_stopped_is_named_by_the_others(job, frozen):
    keys = (*STEPS, "--train.global_batch_size=6", *job.trouble(pause_s=0.2))
    ranks = start_ranks(job, keys, keys, keys)
    wait_for_step(ranks[0], 10)
    ranks[frozen].send_signal(signal.SIGSTOP)
    others = [rank for rank in ranks if rank is not ranks[frozen]]
    ended = [job.finish(rank) for rank in others]
    assert [code for code, _, _ in ended] == [1, 1]
    assert f"rank {frozen} " in "".join(err for _, _, err in ended)
    assert ranks[frozen].poll() is None


@pytest.mark.thorough
def test_ranks_that_were_all_stopped_blame_nobody_when_they_continue(job):
    process = job.start("--nproc", "2", *STEPS, "--launch.silence_timeout_s=8", *job.trouble(pause_s=0.1))
    wait_for_step(process, 10)
    ranks = children(process)
    os.kill(ranks[1], signal.SIGSTOP)
    time.sleep(1.5)  # rank 0 sees the last heartbeat of rank 1, and is stopped with it in mind
    os.kill(ranks[0], signal.SIGSTOP)
    time.sleep(10)
    os.kill(ranks[0], signal.SIGCONT)
    time.sleep(1.5)
    os.kill(ranks[1], signal.SIGCONT)
    time.sleep(4)
    process.send_signal(signal.SIGTERM)
    code, _, err = job.finish(process)
    assert (code, err) == (75, "")


@pytest.mark.parametrize("vanished", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_machine_whose_link_goes_down_is_named_by_the_other(job, vanished):
    if reason := reason_against():
        pytest.skip(reason)
    (job.folder / "machine.py").write_text(ENTER)
    with machines() as net:
        port = str(free_port())
        ranks = [
            job.start(
                *(*STEPS, "--hooks.machine.type=./machine.py:Machine", *job.trouble(pause_s=0.2)),
                **net.environment(rank),
                RANK=str(rank),
                WORLD_SIZE="2",
                LOCAL_RANK="0",
                MASTER_PORT=port,
            )
            for rank in range(2)
        ]
        wait_for_step(ranks[0], 10)
        net.vanish(vanished)
        code, _, err = job.finish(ranks[1 - vanished])
        assert code == 1
        first = next(line for line in err.splitlines() if line.startswith("forge-run"))  # after warnings of torch
        assert f"rank {vanished} " in first
        assert not lacks(err, "network")
        assert wait_until(lambda: ranks[vanished].poll() is not None, 60), "it notices the same"


def test_ranks_leave_together_after_the_work_of_one_at_the_end(job):
    """Rank 0 is busy for longer than the limit of silence; srun may kill it once the other rank has gone."""
    (job.folder / "late.py").write_text(
        "import atexit, os, time\nfrom attrs import define\nfrom forge_core import TrainingHook\n"
        "@define(kw_only=True, slots=False)\nclass Late(TrainingHook):\n"
        "    def on_train_end(self, context):\n"
        "        if os.environ['RANK'] == '0':\n"
        "            time.sleep(8)\n"
        "            open('exported', 'w').close()\n"
        "        else:\n"
        "            atexit.register(lambda: open('left', 'w').write(str(os.path.exists('exported'))))\n"
    )
    keys = ("--launch.silence_timeout_s=4", "--hooks.late.type=./late.py:Late", *job.trouble(pause_s=0.5))
    code, _, err = job.finish(job.start("--nproc", "2", *keys))
    assert (code, err) == (0, "")
    assert (job.folder / "left").read_text() == "True"


def test_a_thread_that_does_not_end_is_named(tmp_path):
    script = """
import threading, time
from forge_core.launch.rank_process import this_process
from forge_core.launch.world import World

def work(log):
    this_process.join(World(), 60.0, 1.0)
    this_process.leave()
    this_process.finish()
    threading.Thread(target=time.sleep, args=(1e5,), name="uploader").start()
    return 0

this_process.run(World(), work)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=TIME_LIMIT_S)
    assert done.returncode == 1
    text = "forge-run: rank 0 has done its work and does not exit within launch.hang_timeout_s = 1 s: thread uploader"
    assert done.stderr.startswith(text)
