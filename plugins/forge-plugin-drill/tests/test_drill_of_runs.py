"""Drills of real runs: what recovers is said to recover, and a mechanism that is taken out is missed by name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from forge_testing import TINY_JOB
from forge_testing.refusals import lacks

pytestmark = pytest.mark.slow

JOB = '[job]\nname = "tiny"\n' + TINY_JOB.replace("steps = 4", "steps = 500")

HOOKS = '''
import os

import torch
from attrs import define

from forge_core import TrainingHook


@define(kw_only=True, slots=False)
class Forgetful(TrainingHook):
    """Throws the optimizer's state away when a run continues, as if checkpoints did not hold it."""

    def on_train_begin(self, context):
        if context.step:
            context.optimizer.state.clear()


@define(kw_only=True, slots=False)
class Trembling(TrainingHook):
    """Adds noise that no seed decides, of the size of rounding."""

    def on_gradients(self, context):
        generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "little"))
        for parameter in context.model.parameters():
            parameter.grad *= 1 + 1e-6 * torch.rand(parameter.grad.shape, generator=generator)


@define(kw_only=True, slots=False)
class Stubborn(TrainingHook):
    """Forgets every request to stop."""

    def on_step_end(self, context):
        if not context.requests.final:
            context.requests.stop = ""
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory with the tiny job."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"FORGE_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.setenv("FORGE_TESTS_REAL_STARTS", "1")  # drills find their processes by `/proc/PID/environ`
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "hooks.py").write_text(HOOKS)
    return tmp_path


def drill(*arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code of a drill, and what its JSON says."""
    command = [sys.executable, "-m", "forge_core", "drill", "job.toml", "--json", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.stdout, ended.stderr
    return ended.returncode, json.loads(ended.stdout)


def marked() -> list[str]:
    """Processes of drills in this folder."""
    cache, found = f"FORGE_CACHE={Path.cwd()}/cache".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if cache in variables and any(each.startswith(b"FORGE_DRILL=") for each in variables):
            found.append(path.parent.name)
    return found


def test_a_frozen_rank_is_found_named_and_survived(folder):
    code, told = drill("--nproc=2", "--only=frozen-1", "--launch.silence_timeout_s=6")
    assert code == 0, told["faults"]
    [fault] = told["faults"]
    assert fault["held"]
    assert fault["said"]
    assert fault["found_after_s"] > 2
    assert fault["curve"] == "equal to the bit"
    assert fault["steps_lost"] >= 2
    assert fault["back_after_s"] > 0
    assert not (folder / "runs" / "tiny.drill").exists()
    assert not (folder / "runs" / "tiny").exists()  # the user's own run
    assert not marked()


@pytest.mark.thorough
def test_damage_that_nobody_looks_for_is_missed_by_name(folder):
    code, told = drill("--only=damaged", "--checkpoint.verify=sizes")
    [fault] = told["faults"]
    assert code == 1
    assert not lacks(fault["reason"], "damage")
    assert "checkpoint.verify" in fault["fix"]
    assert Path(fault["log"]).is_file()  # kept, as something did not hold


@pytest.mark.thorough
def test_every_fault_on_two_ranks():
    code, told = drill("--nproc=2")
    faults = {(fault["fault"], fault["rank"]): fault for fault in told["faults"]}
    assert code == 0, {key: fault["reason"] for key, fault in faults.items() if fault["reason"]}
    both = {(name, rank) for name in ("killed", "frozen", "frozen-at-end", "raises") for rank in (0, 1)}
    first = {(name, 0) for name in ("long-export", "stop", "second-signal", "save", "disk-full", "damaged")}
    assert set(faults) == both | first | {("deadlock", 1), ("infinite", 1)}
    assert all(f["curve"] == "equal to the bit" for key, f in faults.items() if key[0] != "infinite")
    assert faults["infinite", 1]["curve"].startswith("equal to the bit up to step 6, then without one update")
    assert faults["stop", 0]["steps_lost"] == 0
    assert faults["damaged", 0]["steps_lost"] == 3
    assert {each["fault"] for each in told["not_drilled"]} == {"spike", "gradient-bit", "weight-bit", "slow"}
    assert not marked()


@pytest.mark.thorough
def test_one_process_has_what_needs_no_others():
    code, told = drill()
    assert code == 0, [fault["reason"] for fault in told["faults"]]
    names = [fault["fault"] for fault in told["faults"]]
    assert names == ["killed", "raises", "stop", "second-signal", "save", "disk-full", "damaged", "infinite"]
    reasons = {each["fault"]: each["reason"] for each in told["not_drilled"]}
    assert not lacks(reasons["frozen"], "one process")


@pytest.mark.thorough
@pytest.mark.parametrize("async_save", ["false", "true"])
def test_a_full_disk_that_the_run_outlives(async_save):
    keys = ("--checkpoint.on_failure=continue", f"--checkpoint.async_save={async_save}")
    code, told = drill("--only=disk-full", *keys)
    [fault] = told["faults"]
    assert code == 0, fault
    assert fault["said"]
    assert fault["back_after_s"] is None  # it went on by itself
    assert fault["curve"] == "equal to the bit"


@pytest.mark.thorough
def test_faults_that_plugins_find():
    hooks = ("--hooks.spikes.action=roll_back", "--hooks.replicas.every=100", "--hooks.stragglers.every=50")
    code, told = drill("--nproc=2", "--only=spike,gradient-bit,weight-bit,slow", "--plugins.sdc.every=100", *hooks)
    faults = {fault["fault"]: fault for fault in told["faults"]}
    assert code == 0, [fault["reason"] for fault in faults.values()]
    assert faults["spike"]["curve"].startswith("equal to the bit up to step 12, then from an earlier state")
    for name in ("gradient-bit", "weight-bit", "slow"):
        assert faults[name]["curve"] == "equal to the bit"
    assert faults["gradient-bit"]["note"] == "with plugins.sdc.every = 1 and not 100"


@pytest.mark.thorough
def test_a_hook_that_only_warns_of_spikes_does_not_hold():
    code, told = drill("--only=spike", "--hooks.spikes.action=warn")
    [fault] = told["faults"]
    assert code == 1
    assert not lacks(fault["reason"], "checkpoint")


@pytest.mark.thorough
def test_a_checkpoint_without_the_optimizers_state_shows_in_the_curve():
    code, told = drill("--only=killed", "--hooks.forgetful.type=./hooks.py:Forgetful")
    [fault] = told["faults"]
    assert code == 1
    assert fault["curve"] == "differs from step 6 on"  # the first loss after an update with an optimizer that forgot
    assert not lacks(fault["reason"], "two runs", "to the bit")
    assert told["spread"] == 0


@pytest.mark.thorough
def test_a_job_that_is_not_deterministic_is_equal_up_to_rounding():
    code, told = drill("--only=killed", "--hooks.trembling.type=./hooks.py:Trembling")
    [fault] = told["faults"]
    assert code == 0, fault
    assert fault["curve"].startswith("equal up to rounding")
    assert 0 < told["spread"] < 1e-4


@pytest.mark.thorough
def test_one_checkpoint_is_too_few():
    code, told = drill("--only=damaged", "--checkpoint.keep=1")
    [fault] = told["faults"]
    assert code == 1
    assert "checkpoint.keep" in fault["fix"]


@pytest.mark.thorough
def test_a_run_that_nobody_watches_hangs_and_is_ended():
    code, told = drill("--nproc=2", "--only=frozen-1", "--launch.hang_timeout_s=0", "--patience=8")
    [fault] = told["faults"]
    assert code == 1
    assert not lacks(fault["reason"], "8 s")
    assert "launch.hang_timeout_s" in fault["fix"]
    assert not marked()  # not even the process that stands still


@pytest.mark.thorough
def test_a_stop_request_that_is_forgotten_is_missed():
    code, told = drill("--only=stop", "--hooks.stubborn.type=./hooks.py:Stubborn")
    [fault] = told["faults"]
    assert code == 1
    assert not lacks(fault["reason"], "exit code 0", "exit code 75")


@pytest.mark.thorough
def test_a_job_that_fails_without_any_fault_is_not_drilled():
    Path("hooks.py").write_text(HOOKS.replace('context.requests.stop = ""', "raise ValueError('of its own')"))
    command = [sys.executable, "-m", "forge_core", "drill", "job.toml", "--hooks.own.type=./hooks.py:Stubborn"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert not lacks(ended.stderr, "exit code 1", "of its own")


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_drill_leaves_no_process_behind(number, folder):
    command = [sys.executable, "-m", "forge_core", "drill", "job.toml", "--nproc=2", "--only=frozen-1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ)
    frozen = folder / "runs" / "tiny.drill" / "frozen-1" / "injected.json"
    until = time.monotonic() + 300
    while not frozen.exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert frozen.exists()
    assert len(marked()) >= 3  # the launcher and two ranks, one of which stands still
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    assert not marked()
    assert not (folder / "runs" / "tiny.drill").exists()
