"""Drills of faults that a time limit finds."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

SILENCE = "--launch.silence_timeout_s=6"


def test_a_frozen_rank_is_found_named_and_survived(drill, folder, processes):
    code, report = drill("--nproc=2", "--only=frozen-1", SILENCE)
    assert code == 0, report["faults"]
    [fault] = report["faults"]
    assert fault["held"]
    assert fault["said"]
    assert fault["found_after_s"] > 2
    assert fault["curve"] == "equal to the bit"
    assert fault["steps_lost"] >= 2
    assert fault["back_after_s"] > 0
    assert not (folder / "runs" / "tiny.drill").exists()
    assert not (folder / "runs" / "tiny").exists()  # the user's own run
    assert not processes()


@pytest.mark.thorough
def test_every_other_fault_that_a_limit_finds(drill, processes):
    only = "--only=frozen-0,frozen-at-end,deadlock,long-export"
    code, report = drill("--nproc=2", only, SILENCE, "--launch.hang_timeout_s=8")
    faults = {(fault["fault"], fault["rank"]): fault for fault in report["faults"]}
    assert code == 0, {key: fault["reason"] for key, fault in faults.items() if fault["reason"]}
    frozen = {("frozen", 0), ("frozen-at-end", 0), ("frozen-at-end", 1)}
    assert set(faults) == frozen | {("deadlock", 1), ("long-export", 0)}
    assert all(fault["curve"] == "equal to the bit" for fault in faults.values())
    assert faults["long-export", 0]["found_after_s"] > 8
    assert not processes()


@pytest.mark.thorough
def test_a_run_that_nobody_watches_hangs_and_is_ended(drill, processes):
    code, report = drill("--nproc=2", "--only=frozen-1", "--launch.hang_timeout_s=0", "--patience=8")
    [fault] = report["faults"]
    assert code == 1
    assert fault["reason"].startswith("nothing happened for 8 s")
    assert "launch.hang_timeout_s" in fault["fix"]
    assert not processes()  # not even the one that stands still
