"""Drills of real runs: what recovers is said to recover, and a mechanism that is taken out is missed by name."""

from __future__ import annotations

import pytest

from forge_testing.refusals import lacks

pytestmark = pytest.mark.slow

IN_BACKGROUND = "--checkpoint.async_save=true"


@pytest.mark.thorough
def test_damage_that_nobody_looks_for_is_missed_by_name(drill, folder):
    code, told = drill("--only=damaged", "--checkpoint.verify=sizes")
    [fault] = told["faults"]
    assert code == 1
    assert not lacks(fault["reason"], "damage")
    assert "checkpoint.verify" in fault["fix"]
    assert (folder / fault["log"]).is_file()  # kept, as something did not hold


@pytest.mark.thorough
def test_every_fault_on_two_ranks_that_needs_no_time_limit(drill, processes):
    code, told = drill("--nproc=2", "--only=killed,raises,stop,second-signal,save,disk-full,damaged,infinite")
    faults = {(fault["fault"], fault["rank"]): fault for fault in told["faults"]}
    assert code == 0, {key: fault["reason"] for key, fault in faults.items() if fault["reason"]}
    assert len(faults) == 10
    assert all(f["curve"] == "equal to the bit" for key, f in faults.items() if key[0] != "infinite")
    assert faults["infinite", 1]["curve"].startswith("equal to the bit up to step 6, then without one update")
    assert faults["stop", 0]["steps_lost"] == 0
    assert faults["damaged", 0]["steps_lost"] == 3
    assert not processes()


@pytest.mark.thorough
def test_one_process_has_what_needs_no_others(drill):
    code, told = drill()
    assert code == 0, [fault["reason"] for fault in told["faults"]]
    names = [fault["fault"] for fault in told["faults"]]
    assert names == ["killed", "raises", "stop", "second-signal", "save", "disk-full", "damaged", "infinite"]
    reasons = {each["fault"]: each["reason"] for each in told["not_drilled"]}
    assert not lacks(reasons["frozen"], "one process")


@pytest.mark.thorough
@pytest.mark.parametrize("keys", [[], [IN_BACKGROUND], [IN_BACKGROUND, "--plugins.slow.type=./hooks.py:SlowSaves"]])
def test_a_full_disk_that_the_run_outlives(keys, drill):
    code, told = drill("--only=disk-full", "--checkpoint.on_failure=continue", *keys)
    [fault] = told["faults"]
    assert code == 0, fault
    assert fault["said"]
    assert fault["back_after_s"] is None  # it went on by itself
    assert fault["curve"] == "equal to the bit"


@pytest.mark.thorough
def test_faults_that_plugins_find(drill):
    hooks = ("--hooks.spikes.action=roll_back", "--hooks.replicas.every=100", "--hooks.stragglers.every=50")
    code, told = drill("--nproc=2", "--only=spike,gradient-bit,weight-bit,slow", "--plugins.sdc.every=100", *hooks)
    faults = {fault["fault"]: fault for fault in told["faults"]}
    assert code == 0, [fault["reason"] for fault in faults.values()]
    assert faults["spike"]["curve"].startswith("equal to the bit up to step 12, then from an earlier state")
    for name in ("gradient-bit", "weight-bit", "slow"):
        assert faults[name]["curve"] == "equal to the bit"
    assert faults["gradient-bit"]["note"] == "with plugins.sdc.every = 1 and not 100"


@pytest.mark.thorough
def test_a_hook_that_only_warns_of_spikes_does_not_hold(drill):
    code, told = drill("--only=spike", "--hooks.spikes.action=warn")
    [fault] = told["faults"]
    assert code == 1
    assert not lacks(fault["reason"], "checkpoint")


@pytest.mark.thorough
def test_a_checkpoint_without_the_optimizers_state_shows_in_the_curve(drill):
    code, told = drill("--only=killed", "--hooks.forgetful.type=./hooks.py:Forgetful")
    [fault] = told["faults"]
    assert code == 1
    assert fault["curve"] == "differs from step 6 on"  # the first loss after an update with an optimizer that forgot
    assert not lacks(fault["reason"], "two runs", "to the bit")
    assert told["spread"] == 0


@pytest.mark.thorough
def test_a_job_that_is_not_deterministic_is_equal_up_to_rounding(drill):
    code, told = drill("--only=killed", "--hooks.trembling.type=./hooks.py:Trembling")
    [fault] = told["faults"]
    assert code == 0, fault
    assert fault["curve"].startswith("equal up to rounding")
    assert 0 < told["spread"] < 1e-4


@pytest.mark.thorough
def test_one_checkpoint_is_too_few(drill):
    code, told = drill("--only=damaged", "--checkpoint.keep=1")
    [fault] = told["faults"]
    assert code == 1
    assert "checkpoint.keep" in fault["fix"]


@pytest.mark.thorough
def test_a_stop_request_that_is_forgotten_is_missed(drill):
    code, told = drill("--only=stop", "--hooks.stubborn.type=./hooks.py:Stubborn")
    [fault] = told["faults"]
    assert code == 1
    assert not lacks(fault["reason"], "exit code 0", "exit code 75")


@pytest.mark.thorough
def test_a_job_that_fails_without_any_fault_is_not_drilled(start):
    process = start("--hooks.own.type=./hooks.py:Failing")
    _, errors = process.communicate()
    assert process.returncode == 1
    assert "the job fails without any fault, with exit code 1" in errors
    assert "of its own" in errors
