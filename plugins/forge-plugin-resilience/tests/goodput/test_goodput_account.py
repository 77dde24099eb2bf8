"""Each second of a run belongs to one class: accounts against hand-made ones."""

from __future__ import annotations

import json

import pytest

from forge_core.contracts.phase import Phase
from forge_core.contracts.run_end import Cause, End
from forge_plugin_resilience.goodput.accounting import CLASSES, account_of
from forge_plugin_resilience.goodput.events import read_events


def start(name, began, from_step, imports=10.0, load=5.0, **facts):
    """A start that is ready after `imports` + `load` seconds."""
    return [
        {"event": "start", "start": name, "t": began, "began": began, "ranks": 8, "from_step": from_step, **facts},
        {
            "event": "ready",
            "start": name,
            "t": began + imports + load,
            "s": {Phase.IMPORTS: imports, "loading the checkpoint": load},
        },
    ]


def steps(name, t, first, last, seconds=1.0, data=0.0, hook=0.0):
    """Steps of `seconds` each, of which the last ended at `t`."""
    count = last - first + 1
    spent = {"forward and backward": (seconds - data - hook) * count, "data": data * count, "hook a": hook * count}
    spent = {phase: value for phase, value in spent.items() if value}
    return {"event": "steps", "start": name, "t": t, "first": first, "step": last, "n": count, "s": spent}


def line(event, name, t, step, seconds=0.0, **facts):
    phase = {"save": "save", "evaluation": "evaluation", "undone": "going back", "end": "end"}.get(event, "")
    return {"event": event, "start": name, "t": t, "step": step, "s": {phase: seconds} if seconds else {}, **facts}


def classes(account):
    assert sum(account.classes.values()) == pytest.approx(account.lifetime, abs=1e-6)
    assert account.classes.keys() == CLASSES.keys()
    return {name: round(seconds, 6) for name, seconds in account.classes.items() if round(seconds, 6)}


KILLED = [
    *start("a", 1000.0, 0),
    steps("a", 1018.0, 1, 1, seconds=3.0),
    steps("a", 1027.0, 2, 10, data=0.2, hook=0.1),
    line("save", "a", 1029.0, 10, 2.0, bytes=7),
    steps("a", 1034.0, 11, 15),
]


def test_a_run_that_died_has_lost_its_steps_since_the_last_save():
    account = account_of(KILLED)
    assert classes(account) == {
        "initialisation": 10,
        "restore": 5,
        "first_step": pytest.approx(2.3),
        "productive": pytest.approx(0.7 + 9 * 0.7),
        "data": pytest.approx(1.8),
        "hooks": pytest.approx(0.9),
        "save": 2,
        "made_again": 5,
    }
    assert (account.failures, account.attempts[0].lost_steps, account.attempts[0].why) == (1, 5, "died without a word")


def test_end_json_says_why_a_start_without_a_last_line_died():
    end = End(code=1, cause=Cause.KILLED, reason="rank 3 was killed by SIGKILL", ended=1060.0)
    [attempt] = account_of(KILLED, end=end).attempts
    assert (attempt.why, attempt.end, attempt.totals()["silent"]) == (end.reason, end, 26)
    [earlier, later] = account_of([*KILLED, *start("b", 1100.0, 10)], end=end).attempts
    assert (earlier.end, later.end) == (None, None), "it is of another start"


def test_a_run_that_is_running_has_lost_nothing_yet():
    account = account_of(KILLED, now=1040.0)
    assert classes(account)["open"] == 6
    assert "made_again" not in classes(account)
    assert account.failures == 0


def test_a_restart_makes_steps_again_and_the_time_between_is_down():
    events = [
        *KILLED,
        *start("b", 1100.0, 10),
        steps("b", 1117.0, 11, 11, seconds=2.0),
        steps("b", 1126.0, 12, 20),
        line("evaluation", "b", 1130.0, 20, 4.0),
        line("save", "b", 1131.0, 20, 1.0),
        line("end", "b", 1131.5, 20, 0.5, code=75, cause="signal", reason="signal SIGTERM"),
    ]
    account = account_of(events)
    assert classes(account) == {
        "initialisation": 20,
        "restore": 10,
        "first_step": pytest.approx(2.3 + 1.0),
        "productive": pytest.approx(7.0 + 10.0),
        "data": pytest.approx(1.8),
        "hooks": pytest.approx(0.9),
        "save": 3,
        "evaluation": 4,
        "made_again": 5,
        "down": 66,
        "other": 0.5,
    }
    assert account.goodput == pytest.approx(17 / 131.5)
    assert account.restarts() == [81.0]
    assert [attempt.failed for attempt in account.attempts] == [True, False]


def test_a_line_that_a_restart_divides_counts_up_to_the_checkpoint():
    events = [*start("a", 0.0, 0), steps("a", 35.0, 1, 20), *start("b", 100.0, 5)]
    account = account_of(events, now=115.0)
    assert classes(account) == {
        "initialisation": 20, "restore": 10, "productive": 5, "made_again": 15, "down": 65
    }  # fmt: skip
    assert account.attempts[0].lost_steps == 15


def test_a_roll_back_takes_the_effect_of_steps_and_their_time():
    events = [
        *start("a", 0.0, 0),
        steps("a", 25.0, 1, 10),
        line("save", "a", 26.0, 10, 1.0),
        steps("a", 30.0, 11, 14),
        line("undone", "a", 32.0, 14, 2.0, **{"from": 14, "to": 10, "why": "spike"}),
        steps("a", 38.0, 15, 20),
        line("save", "a", 39.0, 20, 1.0),
        line("end", "a", 39.0, 20, code=0, cause="finished"),
    ]
    assert classes(account_of(events)) == {
        "initialisation": 10,
        "restore": 5,
        "productive": 16,
        "save": 2,
        "undone": 6,
    }
    # It died before it saved again: it goes on from step 12, a checkpoint of the time before the roll-back
    found = classes(account_of([*events[:7], *start("b", 100.0, 12)], now=115.0))
    assert (found["productive"], found["made_again"], found["undone"]) == (10 + 2, 6, 2 + 2)


def test_a_state_that_was_put_back_makes_steps_again_for_good():
    events = [
        *start("a", 0.0, 0),
        steps("a", 25.0, 1, 10),
        line("undone", "a", 26.0, 10, 1.0, **{"from": 10, "to": 5, "why": "a state was put back"}),
        steps("a", 30.0, 6, 9),
        *start("b", 100.0, 8),
    ]
    found = classes(account_of(events, now=115.0))
    assert (found["productive"], found["undone"], found["made_again"]) == (8, 6, 1)


def test_the_queue_and_the_end_of_a_job_that_hung_are_known_from_slurm():
    slurm = [
        {"job": "7", "restart": 0, "began": 990.0, "ended": 1060.0, "kind": "failed", "reason": "rank 3: hang"},
        {
            "job": "7",
            "restart": 1,
            "began": 1100.0,
            "ended": 1110.0,
            "kind": "failed",
            "reason": "no torch",
            "code": 1,
        },
        {"job": "7", "restart": 2, "began": 1180.0, "ended": 1230.0, "kind": "preempted", "reason": "preempted"},
    ]
    first = [{**event, "job": "SLURM 7", "restart": 0, "queued_s": 90.0} for event in KILLED[:1]] + KILLED[1:]
    events = [*first, *start("c", 1200.0, 10, job="SLURM 7", restart=2), steps("c", 1225.0, 11, 20)]
    account = account_of(events, slurm=slurm)
    found = classes(account)
    assert found["queue"] == 90 + 40 + 70
    assert found["silent"] == pytest.approx(26 + 5)
    assert found["initialisation"] == 10 + 10 + 10 + 10 + 20  # of two starts, two launches, and one that never trained
    assert "down" not in found
    assert account.began == 900.0
    assert account.ettr == pytest.approx(found["productive"] / 330)
    assert account.goodput == pytest.approx(found["productive"] / 130)
    assert [attempt.failed for attempt in account.attempts] == [True, True, False]
    assert [attempt.why for attempt in account.attempts] == ["rank 3: hang", "no torch", "preempted"]


def test_saves_in_the_background_are_committed_later_or_never():
    events = [
        *start("a", 0.0, 0),
        steps("a", 25.0, 1, 10),
        line("save", "a", 25.5, 10, 0.5, in_background=True),
        steps("a", 35.5, 11, 20),
        line("written", "a", 35.5, 10, write_s=8.0, bytes=100),
        line("save", "a", 36.0, 20, 0.5, in_background=True),
    ]
    account = account_of(events)
    assert [(save.step, save.committed, save.write_s, save.size) for save in account.saves] == [
        (10, True, 8.0, 100),
        (20, False, None, None),
    ]
    assert account.attempts[0].lost_steps == 10


def test_a_second_run_in_one_process_does_not_count_its_imports_twice():
    events = [
        *start("a", 1000.0, 0),
        steps("a", 1025.0, 1, 10),
        line("save", "a", 1026.0, 10, 1.0),
        line("end", "a", 1026.0, 10, code=75, cause="request", reason="stop"),
        {"event": "start", "start": "b", "t": 1000.0, "began": 1000.0, "from_step": 10},
        {"event": "ready", "start": "b", "t": 1040.0, "s": {Phase.IMPORTS: 35.0, "building the model": 5.0}},
    ]
    found = classes(account_of(events))
    assert (found["initialisation"], found["preparation"]) == (10 + 9, 5)


def test_torn_lines_and_lines_of_others_are_passed_over(tmp_path):
    path = tmp_path / "events.jsonl"
    text = "\n".join(json.dumps(event) for event in KILLED)
    path.write_text(f'{{"event": "st\n{text}\n[1]\n{{"event": "new", "t": 3}}\n{{"event": "steps", "t": 1050')
    assert classes(account_of(read_events(path))) == classes(account_of(KILLED))
    assert account_of(read_events(tmp_path / "none.jsonl")).attempts == []
