"""The hook `slurm` in a run of its own, with a stand-in for `squeue` that knows how much time is left."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from forge_core import TrainingHook
from forge_core.checkpoint.run_folder import RunFolder
from forge_core.contracts.run_end import Cause
from forge_plugin_launch.slurm.hook import LEAST_MARGIN_S, Slurm
from forge_testing.refusals import lacks, naming


@pytest.fixture
def allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Be in SLURM job 17, whose `squeue` says these times left, the last one for ever."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")

    def leave(*times: str) -> None:
        answers = tmp_path / "answers"
        answers.write_text("".join(f"{each}\n" for each in times))
        program = tmp_path / "bin" / "squeue"
        lines = f"n=$(wc -l < {answers}); head -1 {answers}; [ $n -gt 1 ] && sed -i 1d {answers}; true"
        program.write_text(f"#!/bin/bash\n{lines}\n")
        program.chmod(0o755)

    return leave


@pytest.fixture
def job(make_job):
    return lambda **changes: make_job(steps=6, **changes)


def progress(summary) -> dict:
    return json.loads((summary.folder / "slurm/progress.json").read_text())


def test_a_run_stops_when_the_margin_is_reached(allocation, job, train):
    allocation("0:59")
    summary = train(job(), Slurm())
    assert summary.step == 1
    assert not lacks(summary.stopped, "time limit", "job 17")
    assert RunFolder(summary.folder).end().cause == Cause.TIME
    assert progress(summary) | {"slowest_save_s": 0} == {
        "job": "17", "restart": 0, "began": 0, "saved": 1, "steps": 6, "ended": 1, "slowest_save_s": 0,
    }  # fmt: skip


def test_a_limit_that_was_raised_meanwhile_counts(allocation, job, train):
    allocation("0:59", "2:00:00")
    assert train(job(), Slurm()).step == 6


def test_time_enough_and_no_limit_change_nothing(allocation, job, train):
    for left in ("2:00:00", "UNLIMITED"):
        allocation(left)
        assert train(job(job={"name": left.replace(":", "-")}), Slurm()).stopped == ""


def test_the_margin_is_the_users_or_measured(allocation, job, train):
    allocation("1:40:00")
    assert Slurm(margin_s=7).margin == 7
    hook = Slurm()
    hook._steps = []
    assert hook.margin == LEAST_MARGIN_S
    hook.slowest_save_s, hook._steps = 40.0, [1.0, 5.0, 2.0]
    assert hook.margin == 2 * 40 + 2 * 5

    class SlowSave(TrainingHook):
        """Makes what lies between a step and its checkpoint's commit slow."""

        def on_step_end(self, context):
            time.sleep(0.2)

    measured = Slurm()
    train(job(checkpoint={"interval": 2}), measured, SlowSave())  # which runs after `measured`
    assert 0.2 < measured.slowest_save_s < 60


def test_the_slowest_save_travels_with_checkpoints(allocation, job, train):
    allocation("1:40:00")
    first = Slurm(margin_s=1)
    train(job(checkpoint={"interval": 2}), first)
    again = Slurm(margin_s=1)
    state = first.state_dict()
    again.load_state_dict(state)
    assert again.slowest_save_s == first.slowest_save_s > 0


def test_the_end_is_not_known_without_squeue_and_that_is_said(allocation, job, train, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.warns(UserWarning, match=naming("squeue", "PATH")):
        assert train(job(), Slurm()).step == 6
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 30))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(job(job={"name": "other"}), Slurm()).step == 1


def test_outside_slurm_it_says_that_it_does_nothing(job, train, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.warns(UserWarning, match=naming("slurm", "SLURM")):
        summary = train(job(), Slurm())
    assert not (summary.folder / "slurm").exists()
