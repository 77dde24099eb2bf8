"""What is done after each way in which an attempt can end."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from forge_core.contracts.run_end import Cause, End
from forge_plugin_launch.slurm.decision import ENDED, HELD, QUEUED, Outcome, Policy, decide
from forge_plugin_launch.slurm.records import SlurmAttempt


def stopped(cause: Cause = Cause.SIGNAL, signal: str = "SIGTERM", reason: str = "", **facts: Any) -> Outcome:
    end = End(code=75, cause=cause, signal=signal, reason=reason or f"signal {signal}", step=150)
    return Outcome(code=75, end=end, **facts)


def failed(
    reason: str = "ValueError: no", step: int | None = 150, cause: Cause = Cause.FAILED, **facts: Any
) -> Outcome:
    return Outcome(code=1, end=End(code=1, cause=cause, reason=reason, step=step), **facts)


FINISHED = End(code=0, cause=Cause.FINISHED, step=200)


def attempt(**facts: Any) -> SlurmAttempt:
    return SlurmAttempt(**{"job": "17", "began": 0.0, "step_began": 100, "step_ended": 150, "saved": 100} | facts)


def decided(outcome: Outcome, *before: SlurmAttempt, policy: Policy | None = None, **facts: Any) -> SlurmAttempt:
    return decide(attempt(**facts), outcome, before, policy or Policy())


ENDS = {
    "the last step": (Outcome(code=0, end=FINISHED), "finished", ENDED),
    "the last step, although SLURM has queued it again": (
        Outcome(code=0, queued=True, end=FINISHED),
        "finished",
        ENDED,
    ),
    "a wrong job": (Outcome(code=2), "bad job", ENDED),
    "non-finite": (Outcome(code=76), "non-finite", ENDED),
    "a second signal": (Outcome(code=130), "stopped", ENDED),
    "preempted, saved": (stopped(preempted=True), "preempted", QUEUED),
    "preempted, killed at the end of its grace": (Outcome(code=137, due_to="PREEMPTION"), "preempted", QUEUED),
    "SIGTERM while time is left": (stopped(), "preempted", QUEUED),
    "SIGTERM before training began": (
        Outcome(code=75, end=End(code=75, cause=Cause.SIGNAL, signal="SIGTERM", reason="stopped by SIGTERM")),
        "preempted",
        QUEUED,
    ),
    "a stop that the run did not record": (Outcome(code=75), "failed", QUEUED),
    "a stop reason that looks like a signal": (stopped(Cause.REQUEST, "", "signal-to-noise below 1"), "failed", QUEUED),
    "a stop reason that looks like a time limit": (stopped(Cause.REQUEST, "", "time limit of mine"), "failed", QUEUED),
    "srun ends with 0, and the run recorded nothing": (Outcome(code=0), "failed", QUEUED),
    "the hook, before the time limit": (
        stopped(Cause.TIME, "", "time limit: job 17 ends in 83 s"),
        "time",
        QUEUED,
    ),
    "the time limit itself": (Outcome(code=137, due_to="TIME LIMIT", ended_by_slurm=True), "time", QUEUED),
    "the time limit, saved": (stopped(due_to="TIME LIMIT"), "time", QUEUED),
    "USR1 shortly before the end": (stopped(signal="SIGUSR1", seconds_left=250), "time", QUEUED),
    "USR1 by hand": (stopped(signal="SIGUSR1", seconds_left=9000), "stopped", ENDED),
    "USR1 by hand, no limit": (stopped(signal="SIGUSR1"), "stopped", ENDED),
    "a hook that wants another start": (stopped(Cause.REQUEST, "", "gpu 3 throttles"), "failed", QUEUED),
    "scancel, saved": (Outcome(code=75, ended_by_slurm=True, terminated=True), "cancelled", ENDED),
    "scancel, not saved": (Outcome(code=143, ended_by_slurm=True, terminated=True), "cancelled", ENDED),
    "scontrol requeue by a person": (Outcome(code=143, queued=True, due_to="JOB REQUEUE"), "preempted", QUEUED),
    "a task was killed": (Outcome(code=137, killed="task 1 on gpu07: Killed"), "failed", QUEUED),
    "an exception": (failed(), "failed", QUEUED),
    "a node failed": (Outcome(code=1, failed_nodes=("gpu07",)), "node", QUEUED),
    "a node failed, and SLURM was first": (Outcome(code=1, queued=True, due_to="NODE FAILURE"), "node", QUEUED),
}


@pytest.mark.parametrize(("outcome", "kind", "action"), ENDS.values(), ids=ENDS)
def test_each_way_to_end_has_its_action(outcome: Outcome, kind: str, action: str) -> None:
    ended = decided(outcome)
    assert (ended.kind, ended.action) == (kind, action)
    assert ended.reason


@pytest.mark.parametrize("kind", ["preempted", "time", "failed", "node"])
def test_a_kind_that_the_cluster_file_does_not_name_is_not_queued_again(kind: str) -> None:
    [outcome] = [outcome for name, (outcome, _, _) in ENDS.items() if name == _example(kind)]
    others = Policy(requeue=tuple({"preempted", "time", "failed", "node"} - {kind}))
    ended = decided(outcome, policy=others)
    assert ended.action == ENDED
    assert kind in ended.reason


def _example(kind: str) -> str:
    named = {"preempted": "preempted, saved", "time": "the time limit itself", "failed": "a task was killed"}
    return named.get(kind, "a node failed")


FAILED = failed("RuntimeError: file 3 is gone", 120)


def failures(count: int, **facts: Any) -> list[SlurmAttempt]:
    """Failures of different errors, so that only their number counts."""
    before: list[SlurmAttempt] = []
    for number in range(count):
        outcome = failed(f"{'abcdefgh'[number]}: no", 120)
        before.append(decided(outcome, *before, **facts))
    return before


def test_a_job_that_fails_without_a_new_checkpoint_is_held_after_max_idle_restarts() -> None:
    assert [each.action for each in failures(4)] == [QUEUED, QUEUED, QUEUED, HELD]
    held = failures(4)[-1]
    assert "scontrol release 17" in held.reason
    assert [each.action for each in failures(6, saved=140)] == [QUEUED] * 6


def test_a_checkpoint_and_a_release_by_hand_start_the_count_anew_and_preemptions_do_not_count() -> None:
    three = failures(3)
    assert decided(FAILED, *three, saved=140).action == QUEUED
    assert decided(FAILED, *three, decided(failed("x: no", 120), saved=140)).action == QUEUED
    assert decided(FAILED, *failures(4)).action == QUEUED
    preempted = decided(Outcome(code=75, preempted=True), *three)
    assert preempted.action == QUEUED
    assert decided(FAILED, *three, preempted).action == HELD


def test_a_time_limit_that_leaves_no_time_for_a_checkpoint_counts_too() -> None:
    limit = Outcome(code=137, due_to="TIME LIMIT")
    before: list[SlurmAttempt] = []
    for _ in range(4):
        before.append(decided(limit, *before))
    assert [each.action for each in before] == [QUEUED, QUEUED, QUEUED, HELD]
    assert "margin_s" in before[0].reason


def test_the_same_error_after_the_same_step_twice_in_a_row_is_the_jobs_fault() -> None:
    first = decided(FAILED, saved=110)
    again = failed("RuntimeError: file 4 is gone", 120)  # numbers may differ: a process, an address
    ended = decided(again, first, saved=110)
    assert ended.action == ENDED
    assert "its data" in ended.reason
    assert decided(failed("RuntimeError: file 3 is gone", 121), first, saved=110).action == QUEUED
    assert decided(failed("KeyError: 'x'", 120), first, saved=110).action == QUEUED
    assert decided(FAILED, first, decided(Outcome(code=75, preempted=True)), saved=110).action == QUEUED
    in_use = failed("a file system is gone", None)  # before training: counts, no more
    assert decided(in_use, decided(in_use, saved=110), saved=110).action == QUEUED


def test_a_job_that_was_submitted_again_after_the_same_error_may_try_once_more() -> None:
    first = decided(FAILED, saved=110)
    ended = decided(FAILED, first, saved=110)
    assert decided(FAILED, first, ended, saved=110).action == QUEUED


def test_a_node_on_which_tasks_were_killed_or_devices_failed_twice_is_left_out() -> None:
    killed = Outcome(code=137, killed="task 9 on gpu07: Killed", suspects=("gpu07",))
    device = failed("RuntimeError: CUDA error: uncorrectable ECC error", 7, suspects=("gpu07",))
    first = decided(killed, saved=140)
    assert (first.blamed, first.excluded) == (("gpu07",), ())
    other = decided(evolve(device, suspects=("gpu09",)), first, saved=140)
    assert other.excluded == ()
    second = decided(device, first, other, saved=140)
    assert second.excluded == ("gpu07",)
    assert decided(device, first, other, second, saved=140).excluded == ()  # it is left out already


def test_an_exception_in_the_users_code_blames_no_node() -> None:
    error = failed(suspects=("gpu07",))
    assert decided(error).blamed == ()
    assert decided(failed("it does not respond to me", suspects=("gpu07",))).blamed == ()


def test_a_rank_that_does_not_respond_blames_its_node() -> None:
    assert decided(failed("rank 3 is gone", cause=Cause.SILENT, suspects=("gpu07",))).blamed == ("gpu07",)
    assert decided(failed("rank 3 is late", cause=Cause.HANG, suspects=("gpu07",))).blamed == ()


def test_a_hook_that_stops_every_start_is_held_whatever_it_says() -> None:
    before: list[SlurmAttempt] = []
    for _ in range(4):
        before.append(decided(stopped(Cause.REQUEST, "", "a fault:\n row remap pending"), *before))
    assert [each.action for each in before] == [QUEUED, QUEUED, QUEUED, HELD]


def test_a_task_that_is_killed_after_the_last_step_blames_no_node() -> None:
    """An export that takes too much memory does so on every node; the job is held in the end."""
    killed = Outcome(code=137, killed="task 0 on gpu07: Killed", suspects=("gpu07",), trained=True)
    assert decided(killed).blamed == ()
    assert decided(evolve(killed, trained=False)).blamed == ("gpu07",)
