"""Real runs: one that was killed twice, rolled back, evaluated and saved; what `forge-run profile goodput` says."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from attrs import define

from forge_core import TrainingHook
from forge_core.checkpoint.run_folder import owned
from forge_core.cli import main
from forge_core.contracts.layout import Layout
from forge_core.contracts.phase import COMPUTING
from forge_core.contracts.run_end import Cause
from forge_core.engine.trainer import Trainer
from forge_plugin_resilience.goodput import Goodput
from forge_plugin_resilience.goodput.accounting import CLASSES, account_of
from forge_plugin_resilience.goodput.events import EventLog, process_began, read_events
from forge_plugin_resilience.goodput.run_account import read_run
from forge_plugin_resilience.goodput.slurm_facts import slurm_facts
from forge_testing import tiny_job
from forge_testing.processes import exit_code_of_fork, run_on_ranks
from forge_testing.refusals import at, check_problems, lacks, naming

STEPS, UPDATE_S, HOOK_S = 12, 0.02, 0.01


@define(kw_only=True, slots=False)
class Eventful(TrainingHook):
    """Updates and hooks of known duration; dies before step `dies`, and goes back once, after step 9."""

    dies: int

    def on_train_begin(self, context):
        update = context.optimizer.step
        context.optimizer.step = lambda *args: (time.sleep(UPDATE_S), update(*args))[1]

    def on_step_begin(self, context):
        if context.step == self.dies:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_end(self, context):
        time.sleep(HOOK_S)
        if context.step == 9:
            context.request_rollback("as the test says", to=8)


def eventful_job(folder, catalog, **checkpoint):
    hooks = {"goodput": Goodput(every_s=1e-9)}  # a line for each step
    settings = {"interval": 2, "interval_minutes": 0, **checkpoint}
    return tiny_job(str(folder), catalog, steps=STEPS, hooks=hooks, checkpoint=settings, eval={"interval": 4})


def in_a_process(job, catalog, dies=0):
    """Train in a process of its own; returns its exit code, or the signal that ended it as a negative number."""

    def run():
        torch.set_num_threads(1)  # threads of a pool do not survive a fork
        Trainer(job, hooks=[Eventful(dies=dies)], catalog=catalog, echo=lambda text: None).run()

    return exit_code_of_fork(run)


@pytest.fixture(scope="module")
def eventful(tmp_path_factory, catalog):
    """The run, and the clock before and after it."""
    folder = tmp_path_factory.mktemp("eventful")
    job, before = eventful_job(folder, catalog), time.time()
    codes = [in_a_process(job, catalog, dies) for dies in (6, 8, 0)]
    assert codes == [-signal.SIGKILL, -signal.SIGKILL, 0]
    return folder / "run", before, time.time()


def test_every_second_is_accounted_for_once(eventful):
    folder, before, after = eventful
    account = read_run(folder).account
    assert before - 0.02 < account.began < account.ended < after
    assert account.classes.keys() == CLASSES.keys()
    assert sum(account.classes.values()) == pytest.approx(account.lifetime, abs=1e-3)
    assert min(account.classes.values()) > -0.02  # the system's clock of processes has ticks of 10 ms
    assert abs(account.classes["other"]) < 0.02
    for attempt in account.attempts:
        gap = sum(stretch.end - stretch.begin for stretch in attempt.stretches if stretch.event == "gap")
        assert sum(attempt.totals().values()) == pytest.approx(attempt.ended - attempt.began + gap, abs=1e-3)


def test_it_agrees_with_an_account_by_hand(eventful):
    """Steps 5 and 7 were lost with the process and made again; the update of step 9 was rolled back."""
    account = read_run(eventful[0]).account
    assert [(each.facts["from_step"], each.step, each.steps) for each in account.attempts] == [
        (0, 5, 5),
        (4, 7, 3),
        (6, 12, 6),
    ]
    assert [attempt.lost_steps for attempt in account.attempts] == [1, 1, 0]
    assert [[save.step for save in attempt.saves] for attempt in account.attempts] == [[2, 4], [6], [8, 10, 12]]
    assert [attempt.evaluations for attempt in account.attempts] == [1, 0, 2]
    assert [attempt.why for attempt in account.attempts] == ["died without a word"] * 2 + ["finished"]
    assert [(event["from"], event["to"]) for event in account.roll_backs] == [(9, 8)]
    assert (account.failures, account.attempts[-1].end.code) == (2, 0)
    classes = account.classes
    assert classes["productive"] + classes["first_step"] >= (STEPS - 1) * UPDATE_S
    # A hook that runs after `goodput` counts with the line of the next step, here two lost ones and an undone one
    assert classes["hooks"] >= (STEPS - 3) * HOOK_S
    assert classes["made_again"] >= 2 * (UPDATE_S + HOOK_S)
    assert classes["undone"] >= UPDATE_S + HOOK_S
    # Not `down`: a process may begin in the tick of the system's clock, of 10 ms, in which the last one died
    assert min(classes[name] for name in ("evaluation", "save", "restore", "preparation")) > 0
    assert classes["queue"] == classes["silent"] == classes["open"] == 0


def test_the_command_says_it_in_words_and_as_json(eventful, capsys):
    assert main(["profile", "goodput", str(eventful[0])]) == 0
    text = capsys.readouterr().out
    assert "step 12 of 12, 3 starts" in text
    assert not lacks(text, "made again", "2 steps", "step 9 to 8", "as the test says", "failures: 2")
    assert main(["profile", "goodput", str(eventful[0]), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert sum(facts["classes"].values()) == pytest.approx(facts["lifetime_s"], abs=1e-3)
    assert facts["failures"]["count"] == 2
    interval = facts["interval"]
    assert interval["best_s"] > interval["chosen_s"] > 0
    for name in ("best", "chosen"):
        assert interval[f"{name}_steps"] == max(1, round(interval[f"{name}_s"] / facts["step_s"]))
    assert facts["saves"]["bytes"] > 1000


def test_metrics_have_the_share_that_was_productive_so_far(eventful):
    records = [json.loads(line) for line in (eventful[0] / "metrics.jsonl").read_text().splitlines()]
    shares = [record["goodput"] for record in records if "loss" in record]
    assert len(shares) == STEPS
    events = list(read_events(eventful[0] / "events.jsonl"))
    kinds = [event["event"] for event in events]
    undone, last = kinds.index("undone"), len(kinds) - 1 - kinds[::-1].index("steps")
    # What the account had at the roll-back, and the phases of the steps since then
    productive = account_of(events[: undone + 1], now=0.0).classes["productive"]
    steps = [event["s"] for event in events[undone + 1 : last + 1] if event["event"] == "steps"]
    since = [sum(seconds.get(phase, 0.0) for phase in COMPUTING) for seconds in steps]
    found = shares[-1] * (events[last]["t"] - events[0]["began"])
    # The end of step 9, which was undone, stands in the line of the step that follows
    assert productive + sum(since[1:]) - 1e-3 < found < productive + sum(since) + 1e-3


def test_the_picture_is_drawn(eventful, tmp_path, capsys, monkeypatch):
    for name in ("time.png", "time.svg"):
        assert main(["profile", "goodput", str(eventful[0]), "--picture", str(tmp_path / name)]) == 0
        assert (tmp_path / name).stat().st_size > 10_000
    assert main(["profile", "goodput", str(eventful[0]), "--picture", str(tmp_path / "time.doc")]) == 2
    assert "time.doc" in capsys.readouterr().err
    words = ["profile", "goodput", str(eventful[0]), str(eventful[0]), "--picture", str(tmp_path / "time.png")]
    assert main(words) == 2
    too_long = tmp_path / f"{'x' * 300}.png"
    assert main(["profile", "goodput", str(eventful[0]), "--picture", str(too_long)]) == 2
    assert not lacks(capsys.readouterr().err, f"--picture {too_long}", "name too long")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["profile", "goodput", str(eventful[0]), "--picture", str(tmp_path / "time.png")]) == 2
    assert not lacks(capsys.readouterr().err, "--picture", "pip install 'forge-plugin-resilience[picture]'")


def test_a_run_without_events_is_told_as_far_as_its_metrics_go(make_job, train, capsys, tmp_path):
    folder = train(make_job(steps=6)).folder
    assert main(["profile", "goodput", str(folder)]) == 0
    text = capsys.readouterr().out
    assert not lacks(text, "not distinguished", "[hooks.goodput]")
    assert main(["profile", "goodput", str(folder), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert sum(facts["classes"].values()) == pytest.approx(facts["lifetime_s"])
    assert main(["profile", "goodput", str(folder), "--picture", str(tmp_path / "a.png")]) == 2
    (tmp_path / "empty").mkdir()
    assert main(["profile", "goodput", str(tmp_path / "empty")]) == 2
    assert not lacks(capsys.readouterr().err, tmp_path / "empty")


def test_a_run_that_is_running_is_open_at_its_end(eventful, capsys, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "events.jsonl").write_bytes((eventful[0] / "events.jsonl").read_bytes())
    with owned(folder):
        assert main(["profile", "goodput", str(folder), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["running"], facts["attempts"][-1]["why"]) == (True, "running")
    assert facts["classes"]["open"] > 0
    assert sum(facts["classes"].values()) == pytest.approx(facts["lifetime_s"], abs=1e-3)


def test_a_save_in_the_background_waits_for_nobody(tmp_path, catalog):
    def rank(number):
        Trainer(eventful_job(tmp_path, catalog, async_save=True), catalog=catalog, echo=lambda text: None).run()

    run_on_ranks(1, rank)
    saves = read_run(tmp_path / "run").account.saves
    assert [save.step for save in saves] == [2, 4, 6, 8, 10, 12]
    assert all(save.committed and save.size for save in saves)
    assert [save.write_s is None for save in saves] == [False] * 5 + [True]  # the last one is waited for
    assert sum(read_run(tmp_path / "run").account.classes.values()) > 0


def test_a_disk_that_fails_ends_no_run(make_job, train, tmp_path):
    (tmp_path / "run/events.jsonl").mkdir(parents=True)
    job = make_job(hooks={"goodput": Goodput()}, checkpoint={"interval": 2})
    with pytest.warns(UserWarning, match=naming("events.jsonl", "Is a directory")):
        assert train(job).step == 4


def test_a_second_writer_is_refused(make_job):
    one, two = (make_job(hooks={name: Goodput() for name in names}) for names in ("a", "ab"))
    assert list(Goodput().problems(one, Layout())) == []
    check_problems(Goodput().problems(two, Layout()), at("", "goodput"))


def test_an_error_is_noted_with_its_code(make_job, train):
    @define(kw_only=True, slots=False)
    class Fails(TrainingHook):
        def on_step_end(self, context):
            if context.step == 3:
                raise RuntimeError("out of luck\nand more")

    job = make_job(hooks={"goodput": Goodput()}, checkpoint={"interval": 2})
    with pytest.raises(RuntimeError):
        train(job, Fails())
    [attempt] = read_run(Path(job.job.output) / job.job.name).account.attempts
    assert (attempt.end.code, attempt.end.cause) == (1, Cause.FAILED)
    assert attempt.why == "RuntimeError: out of luck and more"
    assert (attempt.failed, attempt.lost_steps) == (True, 0)
    train(job)
    [attempt, _] = read_run(Path(job.job.output) / job.job.name).account.attempts
    assert attempt.lost_steps == 1


def test_half_a_line_is_closed_and_what_was_not_written_comes_later(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "steps", "t": 10')
    log = EventLog(path, {"data": 1.0})
    log.write("start", log.began)
    log.add("ready", {"data": 2.00004}, lambda phase: True)
    log.add("steps", {"data": 2.00008, "save": 0.5}, lambda phase: phase != "save")
    log.add("save", {"data": 2.00008, "save": 0.5}, lambda phase: phase == "save")
    log.close()
    events = list(read_events(path))
    assert [event["event"] for event in events] == ["start", "ready", "steps", "save"]
    assert sum(event["s"].get("data", 0.0) for event in events[1:]) == pytest.approx(2.0001)
    assert events[-1]["t"] - events[-2]["t"] == pytest.approx(0.5, abs=2e-4)


def test_a_process_began_before_now():
    now = time.time()
    assert 0 < process_began(now) <= now
    assert process_began(5.0) == 5.0


# --- SLURM ---------------------------------------------------------------------------------------------------------


def test_slurm_tells_the_time_in_the_queue(tmp_path, monkeypatch):
    scontrol = tmp_path / "scontrol"
    words = "JobId=7 JobName=a b SubmitTime=2026-11-25T10:00:00 StartTime=2026-11-25T10:02:30 Requeue=1"
    scontrol.write_text(f'#!/bin/sh\n[ "$*" = "show job --oneliner 7" ] && echo "{words}"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert slurm_facts() == {}
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert slurm_facts() == {"job": "SLURM 7", "restart": 2, "queued_s": 150.0}
    scontrol.write_text("#!/bin/sh\nexit 1\n")
    assert slurm_facts() == {"job": "SLURM 7", "restart": 2}


def test_jobs_of_slurm_are_read_beside_the_events(make_job, train, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    before = time.time()
    monkeypatch.setattr(
        "forge_plugin_resilience.goodput.events.process_began", lambda latest: latest
    )  # not that of all the tests
    folder = train(make_job(hooks={"goodput": Goodput()})).folder
    attempts = [
        {"job": "6", "restart": 0, "began": before - 90, "ended": before - 80, "kind": "failed", "reason": "no torch"},
        {
            "job": "7",
            "restart": 0,
            "began": before - 10,
            "ended": before + 10,
            "kind": "finished",
            "reason": "finished",
        },
    ]
    capsys.readouterr()
    (folder / "attempts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in attempts) + '{"job": "8')
    assert main(["profile", "goodput", str(folder), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [each["why"] for each in facts["attempts"]] == ["no torch", "finished"]
    assert facts["failures"]["count"] == 1
    assert facts["classes"]["queue"] > 0
    assert sum(facts["classes"].values()) == pytest.approx(facts["lifetime_s"], abs=1e-3)
    (folder / "events.jsonl").unlink()
    assert main(["profile", "goodput", str(folder)]) == 0
    assert "attempts.jsonl has 2 SLURM jobs" in capsys.readouterr().out


@define(kw_only=True, slots=False)
class Waits(TrainingHook):
    """Logs at step 2 what the hook `stragglers` does at some."""

    def on_step_end(self, context):
        if context.step == 2:
            context.log("wait_share", 0.25)
            context.log("slowest_rank", 1)


def test_lines_of_steps_have_the_share_of_waits_where_a_hook_before_measures_it(tmp_path, catalog):
    hooks = {"stragglers": Waits(), "goodput": Goodput(every_s=1e-9)}
    folder = Trainer(tiny_job(str(tmp_path), catalog, steps=3, hooks=hooks), catalog=catalog).run().folder
    steps = [line for line in read_events(folder / "events.jsonl") if line["event"] == "steps"]
    assert [(line.get("wait_share"), line.get("slowest_rank")) for line in steps] == [
        (None, None),
        (0.25, 1),
        (None, None),
    ]


@pytest.mark.parametrize("umask", [0o022, 0o002])
def test_the_umask_decides_who_may_read_and_append_events(tmp_path, umask):
    before = os.umask(umask)
    try:
        EventLog(tmp_path / "events.jsonl", {})
        (tmp_path / "other").touch()
    finally:
        os.umask(before)
    assert (tmp_path / "events.jsonl").stat().st_mode == (tmp_path / "other").stat().st_mode
