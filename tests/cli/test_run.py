"""`forge-run` as a user runs it: real processes, exit codes, the run folder, signals, generation."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forge_testing.processes import HANG_S
from forge_testing.refusals import lacks

JOB = """
[job]
name = "tiny"
[train]
steps = 6
global_batch_size = 4
seq_len = 16
[model]
type = "transformer"
dim = 16
layers = 1
[model.attention]
heads = 2
[data.tokenizer]
type = "bytes"
[[data.sources]]
type = "text"
path = "text"
held_out_every = 3
[optimizer]
type = "adamw"
[eval]
interval = 3
"""

SLOW = """
from attrs import define
from forge_core import TrainingHook


@define(kw_only=True, slots=False)
class Slow(TrainingHook):
    def on_step_end(self, context):
        import time

        print("step", context.step, flush=True)
        time.sleep(0.3)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "text").mkdir()
    for number in range(9):
        (tmp_path / f"text/{number}.txt").write_text(f"file {number} says: " + "the quick brown fox. " * 20)
    return tmp_path


def environment(folder):
    return os.environ | {"FORGE_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}


def forge_run(folder, *arguments):
    command = [sys.executable, "-m", "forge_core", *arguments]
    return subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=HANG_S)


def records(folder):
    return [json.loads(line) for line in (folder / "runs/tiny/metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_everything_in_its_folder_and_generates(folder):
    done = forge_run(folder, "job.toml")
    assert done.returncode == 0, done.stderr
    assert "step 6/6" in done.stdout
    assert done.stdout.rstrip().endswith("runs/tiny")
    run = folder / "runs/tiny"
    assert json.loads((run / "end.json").read_text())["step"] == 6
    kept = {"job.toml", "provenance.json", "plan.txt", "metrics.jsonl", "checkpoints", "tokenizer"}
    assert kept <= {path.name for path in run.iterdir()}
    assert [r["step"] for r in records(folder) if "loss" in r] == [1, 2, 3, 4, 5, 6]
    assert [r["step"] for r in records(folder) if "eval/loss" in r] == [3, 6]
    assert "forge-plugin-adamw" in json.loads((run / "provenance.json").read_text())["distributions"]
    assert forge_run(folder, "check", "runs/tiny/job.toml").returncode == 0

    def generated(*more):
        options = ("--prompt", "the quick", "--prompt", "file", "--max-tokens", "12", "--temperature", "0")
        done = forge_run(folder, "generate", "runs/tiny", *options, *more)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert generated().startswith("the quick")
    assert generated() == generated("--no-cache")


def test_a_bad_job_exits_with_2_and_creates_nothing(folder):
    before = sorted(folder.rglob("*"))
    done = forge_run(folder, "job.toml", "--optimizer.momentum=0.9", "--train.stps=3")
    assert done.returncode == 2
    momentum, steps = done.stderr.splitlines()
    assert momentum.startswith("--optimizer.momentum=0.9: optimizer.momentum: ")
    assert not lacks(momentum, "optimizer.betas")
    assert steps.startswith("--train.stps=3: train.stps: ")
    assert not lacks(steps, "'steps'")
    assert sorted(folder.rglob("*")) == before


def start(folder, *arguments):
    command = [sys.executable, "-m", "forge_core", "job.toml", "--hooks.slow.type=./slow.py:Slow", *arguments]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=folder, env=environment(folder), stdout=pipe, stderr=pipe, text=True)
    deadline = time.monotonic() + HANG_S
    for line in process.stdout:
        if line.startswith("step 2") and "/" not in line:
            return process
        assert time.monotonic() < deadline
    raise AssertionError(process.stderr.read())


def test_a_signal_stops_with_75_and_the_same_command_continues(folder):
    straight = forge_run(folder, "job.toml")
    assert straight.returncode == 0
    expected = [r["loss"] for r in records(folder) if "loss" in r]
    (folder / "runs/tiny").rename(folder / "runs/straight")
    process = start(folder)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 75, err
    assert not lacks(out, "SIGTERM")
    assert json.loads((folder / "runs/tiny/end.json").read_text())["cause"] == "signal"
    assert len(records(folder)) < 8
    again = forge_run(folder, "job.toml", "--hooks.slow.type=./slow.py:Slow")
    assert again.returncode == 0, again.stderr
    assert re.search(r"\bruns/tiny/checkpoints/step-\d\b", again.stdout)
    assert [r["loss"] for r in records(folder) if "loss" in r] == expected


def test_a_second_signal_exits_at_once_with_130(folder):
    process = start(folder, "--train.steps=500")
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)  # another one: equal signals that are pending together count once
    process.communicate(timeout=HANG_S)
    assert process.returncode == 130


def test_a_folder_in_use_is_refused_and_names_its_owner(folder):
    process = start(folder, "--train.steps=500")
    done = forge_run(folder, "job.toml")
    process.kill()
    process.communicate()
    assert done.returncode == 1
    assert not lacks(done.stderr, "runs/tiny", f"process {process.pid}")
    assert "Traceback" not in done.stderr


def test_never_refuses_a_folder_that_has_steps(folder):
    assert forge_run(folder, "job.toml").returncode == 0
    done = forge_run(folder, "job.toml", "--resume", "never")
    assert done.returncode == 2
    assert not lacks(done.stderr, "steps [6]", "job.name")


def test_a_job_may_be_layered_and_overridden(folder):
    (folder / "more.toml").write_text('[job]\nname = "layered"\n[train]\nsteps = 4\n')
    done = forge_run(folder, "job.toml", "more.toml", "--train.steps=2", "--data.sources.0.weight=2.0")
    assert done.returncode == 0, done.stderr
    resolved = (Path(folder) / "runs/layered/job.toml").read_text()
    assert "steps = 2" in resolved
    assert "weight = 2.0" in resolved
