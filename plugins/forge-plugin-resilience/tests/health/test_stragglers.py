"""The slow rank is named, with its machine and its cost."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from attrs import evolve

from forge_plugin_resilience.health.stragglers import (
    SAMPLE_S,
    Look,
    Noise,
    Stragglers,
    WaitMeter,
    describe,
    matmul_ms,
    slow_ranks,
)
from forge_testing import TINY_JOB
from forge_testing.refusals import lacks, naming

JOB = f"""
[job]
name = "tiny"
{TINY_JOB.replace("steps = 4", "steps = 45")}
[checkpoint]
interval = 0
[hooks.slow]
type = "./slow.py:Slow"
[hooks.stragglers]
every = 5
slow = 1.5
"""

SLOW = '''
import os
import signal
import time
from pathlib import Path

from attrs import define
from forge_core import TrainingHook


@define(kw_only=True, slots=False)
class Slow(TrainingHook):
    """Each step takes `each_s`, and on one rank `more_s` longer, or its process is stopped until another wakes it."""

    each_s: float = 0.03
    more_s: float = 0.0
    stops: bool = False

    def on_train_begin(self, context):
        Path(f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))

    def on_step_begin(self, context):
        slow = os.environ["RANK"] == "1"
        time.sleep(self.each_s + (self.more_s if slow else 0))
        if slow and self.stops:
            os.kill(os.getpid(), signal.SIGSTOP)
'''


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "slow.py").write_text(SLOW)
    return tmp_path


def start(folder, *keys):
    command = [sys.executable, "-m", "forge_core", "job.toml", "--nproc=2", *keys]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)


def named(err):
    return [line for line in err.splitlines() if "the others wait for" in line]


@pytest.mark.parametrize(("passed", "waited", "share"), [(4.0, 1.0, 0.25), (4.0, 5.0, 1.0), (0.5, 0.0, 0.0)])
def test_the_share_of_waiting_is_by_the_time_that_passed(monkeypatch, passed, waited, share):
    monkeypatch.setattr("forge_core.parallel.mesh.gather_objects", lambda own: [own, own])
    hook, logged = Stragglers(), {}
    context = SimpleNamespace(step=100, model=torch.nn.Linear(2, 2), log=logged.__setitem__)
    hook.on_train_begin(context)
    hook._look(context, 50, passed, waited)
    hook.on_train_end(context)
    assert logged["wait_share"] == share


@pytest.mark.slow
def test_a_rank_with_more_work_is_named_after_three_looks_with_its_host(folder):
    from forge_kit.tools.metrics import read_metrics

    process = start(folder, "--hooks.slow.more_s=0.15")  # far above what a busy machine adds to either rank
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0
    assert any(f"rank 1 on {socket.gethostname()} " in line and " since step " in line for line in named(err))
    looks = [row for row in read_metrics(folder / "runs/tiny") if "wait_share" in row]
    assert [row["step"] for row in looks] == list(range(10, 50, 5)), "not the first window, which warms up"
    assert sum(row["slowest_rank"] == 1 for row in looks) > len(looks) / 2
    assert all(0.0 < row["wait_share"] < 1.0 for row in looks)


@pytest.mark.slow
def test_a_rank_whose_process_is_stopped_for_a_part_of_each_step_is_named(folder):
    # A busy machine wakes the meter late, and a rank whose step is short then seems slower by many times its length
    keys = ["--train.steps=18", "--hooks.stragglers.every=3", "--hooks.slow.stops=true", "--hooks.slow.each_s=0.25"]
    process = start(folder, *keys)
    over = threading.Event()

    def wake():
        while not over.wait(0.01):
            with suppress(OSError, ValueError):  # not there yet, ended, or just writing its file
                rank = int((folder / "pid-1").read_text())
                if Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                    time.sleep(1.0)  # far above what a busy machine adds to the steps of either rank
                    os.kill(rank, signal.SIGCONT)

    thread = threading.Thread(target=wake)
    thread.start()
    try:
        _, err = process.communicate(timeout=600)
    finally:
        over.set()
        thread.join()
    assert process.returncode == 0
    assert named(err)
    assert all(f"rank 1 on {socket.gethostname()} " in line for line in named(err))


def test_of_the_time_in_which_a_process_was_stopped_two_samples_count_as_a_wait_at_most(monkeypatch):
    meter = WaitMeter()
    meter.stop()
    meter._thread.join()
    times, ends = iter([0.0, 0.02, 5.0]), iter([False, False, True])
    module = "forge_plugin_resilience.health.stragglers"
    monkeypatch.setattr(f"{module}.time", SimpleNamespace(monotonic=lambda: next(times)))
    monkeypatch.setattr(f"{module}.waits", lambda frame: True)
    meter.seconds, meter._over = 0.0, SimpleNamespace(wait=lambda seconds: next(ends))
    meter._run()
    assert meter.seconds == pytest.approx(0.02 + 2 * SAMPLE_S)


def test_the_fastest_of_some_products_counts(monkeypatch):
    """Others are slow because of something else on the machine."""
    ends = iter([3.0, *[0.25] * 5, *[0.5] * 14])
    times = iter([time for end in ends for time in (0.0, end)])
    monkeypatch.setattr(
        "forge_plugin_resilience.health.stragglers.time", SimpleNamespace(perf_counter=lambda: next(times))
    )
    assert matmul_ms(torch.device("cpu")) == 250.0


def look(own_s=1.0, waited=0.0, matmul_ms=5.0, host="gpu01"):
    return Look(host=host, own_s=own_s, waited=waited, matmul_ms=matmul_ms)


def test_a_gpu_that_computes_slower_is_told_from_a_rank_with_more_work():
    looks = [look(waited=0.22), look(waited=0.22), look(matmul_ms=8.0, host="gpu12")]
    found = slow_ranks(looks, 1.15)
    assert set(found) == {2}
    assert not lacks(found[2], 0.62)
    text = describe(2, looks, found[2], 12_300)
    assert not lacks(text, "rank 2 on gpu12", 0.62, "step 12,300", "8 ms", "median 5", "22%")
    assert not lacks(slow_ranks([look(), look(own_s=2.0), look()], 1.15)[1], "2e+03 ms")


def test_ranks_that_are_alike_are_not_slow():
    assert slow_ranks([look(1.0), look(1.1), look(0.95)], 1.15) == {}


def alarms(ratio, sigma, seed=0, looks=400):
    """How often three looks in a row find each of two ranks slow: the second takes `ratio` times as long as the first,
    and each as much more or less as a busy machine gives and takes."""
    draw, noise, in_a_row, found = random.Random(seed), Noise(), [0, 0], [0, 0]
    for _ in range(looks):
        taken = [look(draw.lognormvariate(0, sigma), matmul_ms=5 * draw.lognormvariate(0, sigma)) for _ in range(2)]
        taken[1] = evolve(taken[1], own_s=ratio * taken[1].own_s)
        slow = slow_ranks(taken, 1.15, noise)
        noise.add(taken)
        for rank in range(2):
            in_a_row[rank] = in_a_row[rank] + 1 if rank in slow else 0
            found[rank] += in_a_row[rank] == 3
    return found


@pytest.mark.parametrize("sigma", [0.05, 0.15, 0.3])
def test_ranks_that_a_busy_machine_slows_in_turns_are_not_named(sigma):
    assert alarms(1.0, sigma) == [0, 0]


@pytest.mark.parametrize(("ratio", "sigma"), [(1.3, 0.0), (1.3, 0.03), (2.0, 0.15)])
def test_a_rank_that_is_slow_at_every_look_is_named_on_a_busy_machine_too(ratio, sigma):
    first, second = alarms(ratio, sigma)
    assert first == 0
    assert second > 0


def test_a_slow_rank_is_named_beside_one_whose_time_the_meter_does_not_resolve(monkeypatch):
    monkeypatch.setattr("forge_core.parallel.mesh.gather_objects", lambda mine: [mine, evolve(mine, own_s=1.0)])
    logged = {}
    context = SimpleNamespace(model=torch.nn.Linear(2, 2), step=3, log=logged.__setitem__)
    hook = Stragglers(every=1)
    hook.on_train_begin(context)
    hook.on_train_end(context)
    for waited in (0.99, 1.0):
        hook._look(context, 1, 1.0, waited)
    with pytest.warns(UserWarning, match=naming("rank 1")):
        hook._look(context, 1, 1.0, 0.99)
    assert logged["faulty_rank"] == 1


def test_a_single_rank_has_no_stragglers():
    from forge_core import JobError, load_job

    job = f'[job]\nname = "tiny"\n{TINY_JOB}'
    for hook, words in (("stragglers", "waits for nobody"), ("links", "has no links to others")):
        with pytest.raises(JobError, match=words):
            load_job(f"{job}[hooks.{hook}]\n")
