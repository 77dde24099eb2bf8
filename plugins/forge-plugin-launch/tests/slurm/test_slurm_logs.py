"""Facts from the log of an attempt; the lines are of SLURM 22.05 and of this version of Forge."""

from __future__ import annotations

import pytest

from forge_plugin_launch.slurm.log_facts import TAIL, facts_of, read_log
from forge_plugin_launch.slurm.scheduler import own_job, parse_duration

CANCELLED = "slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-25T12:56:53 ***\n"
FAILURE = "srun: error: Node failure on gpu03\n"
STEP = "slurmstepd: error: *** STEP 5.0 ON n1 CANCELLED AT 2026-11-25T12:55:33 ***\n"


@pytest.mark.parametrize("cause", ["TIME LIMIT", "PREEMPTION", "JOB REQUEUE", "NODE FAILURE"])
def test_slurms_reason_for_ending_a_job(cause: str) -> None:
    more = ", SEE SLURMCTLD LOG FOR DETAILS" if cause == "NODE FAILURE" else ""
    facts = facts_of(STEP + CANCELLED.replace(" ***\n", f" DUE TO {cause}{more} ***\n"))
    assert (facts.ended_by_slurm, facts.due_to) == (True, cause)


def test_scancel_has_no_reason_and_the_end_of_a_step_is_not_that_of_the_job() -> None:
    assert (facts_of(CANCELLED).ended_by_slurm, facts_of(CANCELLED).due_to) == (True, "")
    assert not facts_of(STEP).ended_by_slurm


def test_the_node_of_each_task_that_ended_with_an_error() -> None:
    facts = facts_of(
        "srun: error: gpu02: task 1: Exited with exit code 1\n"
        "srun: error: gpu01: tasks 0,2-3: Exited with exit code 1\n"
    )
    assert facts.hosts == {1: "gpu02", 0: "gpu01", 2: "gpu01", 3: "gpu01"}
    assert facts.killed == {}


def test_sruns_words_about_tasks_and_nodes() -> None:
    facts = facts_of("srun: error: gpu07: tasks 8-9: Killed\nsrun: error: Node failure on gpu03\n")
    assert facts.killed == {8: ("gpu07", "Killed"), 9: ("gpu07", "Killed")}
    assert facts.failed_nodes == ("gpu03",)


def test_tasks_that_srun_kills_after_another_ones_error_are_no_cause() -> None:
    assert facts_of("srun: error: a: task 0: Exited with exit code 1\nsrun: error: b: task 1: Killed\n").killed == {}
    assert list(
        facts_of("srun: error: b: task 1: Killed\nsrun: error: a: task 0: Exited with exit code 1\n").killed
    ) == [1]


@pytest.mark.parametrize(
    ("log", "offset", "nodes"),
    [
        (FAILURE, 0, ("gpu03",)),
        ("earlier\n" + FAILURE, 8, ("gpu03",)),
        (FAILURE + "later\n", len(FAILURE), ()),
        (FAILURE, 10**6, ()),  # truncated since the attempt began: of what is there, nothing is its own for certain
        (FAILURE + "x" * (TAIL - len(FAILURE)), 0, ("gpu03",)),
        (FAILURE + "x" * TAIL, 0, ()),
    ],
)
def test_an_attempt_has_the_facts_behind_its_offset_in_the_tail_of_the_log(tmp_path, log, offset, nodes) -> None:
    (tmp_path / "log").write_text(log)
    assert read_log(tmp_path / "log", offset).failed_nodes == nodes


def test_an_empty_log_has_no_facts() -> None:
    assert facts_of("") == facts_of("step 1/200  loss 3.1\n")


@pytest.mark.parametrize(
    ("text", "seconds"),
    {"90": 5400, "1:30": 90, "12:00:00": 43200, "2-12": 216000, "1-00:00:10": 86410, "INVALID": None, "": None}.items(),
)
def test_times_as_slurm_writes_them(text: str, seconds: float | None) -> None:
    assert parse_duration(text) == seconds


def test_a_task_of_an_array_is_not_named_by_its_number_alone() -> None:
    """Which may be that of the array."""
    assert own_job({"SLURM_JOB_ID": "17"}) == "17"
    assert own_job({"SLURM_JOB_ID": "17", "SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "1"}) == "17_1"
    assert own_job({}) == ""
