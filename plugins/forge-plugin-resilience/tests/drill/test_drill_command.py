"""What a drill refuses, what it leaves out, and how it compares, without a run."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from attrs import evolve

from forge_core import Trainer, load_job
from forge_core.cli import main
from forge_core.contracts.errors import ForgeError
from forge_core.contracts.run_end import Cause, End
from forge_core.launch.progress_beacon import ProgressBeacon
from forge_core.launch.rank_process import this_process
from forge_kit.tools.metrics import FAULTY_RANK
from forge_plugin_resilience.drill.command import step_count
from forge_plugin_resilience.drill.course import Case, Course, cases_of
from forge_plugin_resilience.drill.faults import FAULTS, flip_bit
from forge_plugin_resilience.drill.folder import DrillFolder
from forge_plugin_resilience.drill.injection import Injection
from forge_plugin_resilience.drill.records import Event, Evidence, Record
from forge_plugin_resilience.drill.results import Result, deviation, first_difference
from forge_plugin_resilience.drill.subject import FEWEST_STEPS, prepare
from forge_testing import TINY_JOB
from forge_testing.refusals import lacks, naming

JOB = '[job]\nname = "tiny"\n' + TINY_JOB.replace("steps = 4", "steps = 500")


@pytest.fixture(autouse=True)
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny job in an empty current directory."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def subject(*overrides, ranks=2, steps=12):
    return prepare(["job.toml"], overrides, ranks, steps, None)


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (["--only=frozn"], ["'frozn'", "'frozen'"]),
        (["--only=killed-7"], ["killed-7", "1 ranks", "killed-0"]),
        (["--only=frozen"], ["frozen", "one process"]),
        (["--train.steps=5"], ["train.steps", 5, "6 steps"]),
        (["--optimizer.lrr=1"], ["optimizer.lrr"]),
    ],
)
def test_what_cannot_be_drilled_is_refused_and_leaves_nothing(arguments, facts, capsys):
    assert main(["doctor", "drill", "job.toml", *arguments]) == 2
    assert not lacks(capsys.readouterr().err, *facts)
    assert [path.name for path in Path.cwd().iterdir()] == ["job.toml"]


def test_a_drill_has_room_for_two_saves(capsys):
    assert step_count(str(FEWEST_STEPS)) == FEWEST_STEPS
    with pytest.raises(SystemExit) as end:
        main(["doctor", "drill", "job.toml", f"--steps={FEWEST_STEPS - 1}"])
    assert end.value.code == 2
    assert not lacks(capsys.readouterr().err, "--steps", FEWEST_STEPS)


def test_a_drill_is_not_started_on_ranks(monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert main(["doctor", "drill", "job.toml"]) == 2
    assert not lacks(capsys.readouterr().err, "torchrun", "srun")


def test_every_fault_is_either_drilled_or_has_a_reason():
    cases, refused = cases_of(subject(), [])
    assert {case.fault.name for case in cases} | set(refused) == set(FAULTS)
    assert all(refused.values())
    assert [case.key for case in cases][:4] == ["killed-0", "killed-1", "frozen-0", "frozen-1"]
    both = {f"{name}-{rank}" for name in ("killed", "frozen", "frozen-at-end", "raises") for rank in (0, 1)}
    first = {f"{name}-0" for name in ("long-export", "stop", "second-signal", "save", "disk-full", "damaged")}
    assert {case.key for case in cases} == both | first | {"deadlock-1", "infinite-1"}
    assert set(refused) == {"spike", "gradient-bit", "weight-bit", "slow"}


def test_faults_can_be_named_with_a_rank():
    cases, _ = cases_of(subject(), ["frozen-1", "second-signal", "killed"])
    assert [case.key for case in cases] == ["killed-0", "killed-1", "frozen-1", "second-signal-0"]


@pytest.mark.parametrize("cause", [None, Cause.HANG])
def test_an_end_that_does_not_match_the_fault_is_shown(monkeypatch, cause):
    monkeypatch.setattr(Course, "_evidence", lambda course, case: evidence(cause))  # of rank 1
    result = Result(fault="frozen", rank=0, title="frozen")
    course = Course(subject=subject(), patience_s=1.0, show=print)
    course._judge_first(Case(fault=FAULTS["frozen"](), rank=0), SimpleNamespace(code=1, ended=9.0, left=[]), result)
    assert result.reason.startswith(FAULTS["frozen"].missing)
    assert bool(lacks(result.reason, "hang", "rank 1", "it ended")) == (cause is None)


def test_of_a_run_that_began_anew_the_key_to_set_is_named(monkeypatch):
    attempts = iter([[], [Record(event=Event.BEGIN, step=0, rank=0, time=1.0)]])
    ended = SimpleNamespace(code=0, began=0.0, left=[])
    monkeypatch.setattr(Course, "_records", lambda course, key: next(attempts))
    monkeypatch.setattr(Course, "_run", lambda *arguments: ended)
    case = Case(fault=FAULTS["killed"](), rank=0)
    result = Result(fault="killed", rank=0, title="killed")
    Course(subject=subject(), patience_s=1.0, show=print)._restart(case, [], result, 5)
    assert result.steps_lost == 5
    assert "started over" in result.reason
    assert "checkpoint.interval" in result.fix


def test_a_case_names_the_rank_that_it_hits_if_it_does_not_hit_all():
    cases, _ = cases_of(subject(), ["frozen-1", "disk-full"])
    assert [case.title(subject()) for case in cases] == ["process frozen, rank 1", "disk full at a save"]


def test_a_job_keeps_its_components_and_gets_a_folder_of_its_own(job):
    made = subject("job.name=mine", "optimizer.lr=0.5")
    base, layer = made.write("killed-0", {"steps": 12}, {"launch.hang_timeout_s": 20.0})
    assert made.folder == Path("runs/mine.drill")
    assert 'type = "forge_testing.tiny:TinyModel"' in base.read_text()
    assert "lr = 0.5" in base.read_text()
    assert "hang_timeout_s = 20.0" in layer.read_text()
    assert made.run_folder("killed-0") == Path("runs/mine.drill/runs/mine-drill-killed-0")


def test_checkpoints_in_a_folder_of_all_runs_are_not_touched(tmp_path):
    made = subject(f'checkpoint.storage={{type = "local", folder = "{tmp_path}/shared"}}')
    assert made.tables["checkpoint"]["storage"] == {"type": "forge-run/local"}
    assert not lacks(made.changes[-1], f"{tmp_path}/shared")


def test_one_bit_of_the_newest_checkpoint_is_flipped(job):
    summary = Trainer(load_job(job, overrides=["train.steps=2"]), echo=lambda line: None).run()
    files = sorted((summary.folder / "checkpoints").glob("step-*/*"))
    before = [file.read_bytes() for file in files]
    subject().flip_bit(str(summary.folder))
    changed = [
        (file.parent.name, old ^ new)
        for file, content in zip(files, before, strict=True)
        for old, new in zip(content, file.read_bytes(), strict=True)
        if old != new
    ]
    assert changed == [("step-2", 4)]


@pytest.fixture
def folder():
    return DrillFolder(subject().folder)


def fill(folder):
    """The files of a drill that has trained without a fault."""
    folder.open()
    subject().write("baseline", {"steps": 12}, {})
    (folder.path / "baseline" / "output-1.txt").touch()
    run = subject().run_folder("baseline")
    run.mkdir(parents=True)
    (run / "metrics.jsonl").touch()
    (run / "last").symlink_to(run)


def test_a_folder_that_is_no_drill_is_left_alone(folder):
    folder.path.mkdir(parents=True)
    (folder.path / "thesis.tex").touch()
    with pytest.raises(ForgeError, match=naming(f"--out {folder.path}")):
        folder.open()
    assert (folder.path / "thesis.tex").exists()


def test_the_folder_of_an_earlier_drill_is_replaced_but_not_that_of_one_under_way(folder):
    fill(folder)
    folder.close(keep=True)
    folder.open()
    assert {path.name for path in folder.path.iterdir()} == {".forge-output", "drill.json"}
    (folder.path / "drill.json").write_text(json.dumps({"process": 1}))
    with pytest.raises(ForgeError, match=naming("process 1")):
        folder.open()


def test_a_drill_removes_its_folder(folder):
    fill(folder)
    assert folder.close(keep=False) == []
    assert not folder.path.exists()


def test_files_of_a_user_outlive_the_drill_whose_folder_they_are_in(folder):
    fill(folder)
    notes = [folder.path / "notes.txt", folder.path / "baseline" / "notes.txt"]
    for path in notes:
        path.touch()
    assert folder.close(keep=False) == ["baseline/notes.txt", "notes.txt"]
    assert [path for path in folder.path.rglob("*") if path.is_file()] == notes
    with pytest.raises(ForgeError, match=naming(f"--out {folder.path}")):
        folder.open()


def test_files_of_a_user_in_a_drill_that_was_kept_are_named_and_nothing_is_removed(folder):
    fill(folder)
    folder.close(keep=True)
    (subject().run_folder("baseline") / "notes.txt").touch()
    with pytest.raises(ForgeError, match=naming("runs/tiny-drill-baseline/notes.txt")):
        folder.open()
    assert (subject().run_folder("baseline") / "metrics.jsonl").exists()


class Beats:
    """The ranks' store, which has a heartbeat from training at the third question."""

    questions = 0

    def get(self, topic, ranks):
        self.questions += 1
        return {0: {"step": 2}} if self.questions == 3 else {0: {"step": 0}} if self.questions == 2 else {}


def test_a_rank_stands_still_only_once_the_others_have_heard_of_it_in_training(monkeypatch):
    injection = Injection(str(Path.cwd()), steps=12, fault="frozen", step=7, rank=0)
    store = Beats()
    stopped = []
    monkeypatch.setattr(this_process, "rendezvous", store)
    monkeypatch.setattr(os, "kill", lambda process, number: stopped.append((store.questions, number)))
    FAULTS["frozen"]().at_gradients(injection, None)
    assert stopped == [(3, signal.SIGSTOP)]


@pytest.mark.parametrize("due", [True, False])
def test_no_limit_on_hangs_binds_before_a_fault_that_is_found_by_one(due, monkeypatch):
    """A start of a busy machine is longer than the limit of a drill; with `due`, until the step of the fault."""
    injection = Injection(str(Path.cwd()), steps=12, fault="deadlock", step=7, rank=1)
    monkeypatch.setattr(this_process, "rendezvous", Beats())
    injection.hold_limits()
    [thread] = [each for each in threading.enumerate() if each.name == "forge-drill"]
    reports = ProgressBeacon.reports
    while ProgressBeacon.reports < reports + 2:
        time.sleep(0.01)
    if due:
        injection._armed = True
        injection.step_begins(SimpleNamespace(step=6))
        assert thread.is_alive()
        injection.step_begins(SimpleNamespace(step=7))
    else:
        injection.training_ends(None)
    thread.join(60)
    assert not thread.is_alive()


STEP, RANK = 6, 1


def evidence(cause=None, rank=RANK, code=1, ranks=2, rows=(), records=()):
    """What a run leaves behind whose rank 1 was hit in step 6 at second 100."""
    injected = Record(event=Event.INJECTED, step=STEP, rank=RANK, time=100.0)
    end = None if cause is None else End(code=code, cause=cause, rank=rank, reason="it ended")
    return Evidence(injected=injected, end=end, records=records, rows=rows, ranks=ranks)


def record(event, step=STEP, **facts):
    return Record(event=event, step=step, rank=0, time=101.0, **facts)


BY_ROW = [{"step": 5, "time": 99.0}, {"step": 6, "time": 101.0, FAULTY_RANK: 1, "skipped": 1.0}]
FOUND = {
    "killed": evidence(Cause.KILLED),
    "frozen": evidence(Cause.SILENT),
    "frozen-at-end": evidence(Cause.HANG),
    "long-export": evidence(records=[record(Event.WORKED, ranks=2)]),
    "deadlock": evidence(Cause.HANG, rank=0),
    "raises": evidence(Cause.FAILED),
    "stop": evidence(Cause.SIGNAL, rank=0, code=75),
    "second-signal": evidence(Cause.SIGNAL, code=130),
    "save": evidence(Cause.KILLED),
    "disk-full": evidence(records=[record(Event.SAVE, 4), record(Event.SAVED, 4), record(Event.SAVE, 8)]),
    "damaged": evidence(Cause.SIGNAL, rank=0, code=75),
    "infinite": evidence(rows=BY_ROW),
    "spike": evidence(records=[record(Event.ROLL_BACK, to=4)]),
    "gradient-bit": evidence(rows=BY_ROW),
    "weight-bit": evidence(Cause.FAILED, rank=0, code=77),
    "slow": evidence(rows=BY_ROW),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found_by_what_the_run_records_and_by_nothing_else(name):
    fault = FAULTS[name]()
    found = fault.finding(FOUND[name], RANK)
    assert found is not None
    assert found.text
    assert fault.objection(FOUND[name]) == ""
    nothing = evidence(Cause.FINISHED, code=0, rows=BY_ROW[:1], records=[record(Event.STEP), record(Event.SAVED)])
    assert fault.finding(nothing, RANK) is None


@pytest.mark.parametrize("name", ["killed", "frozen", "raises", "save"])
def test_an_end_that_names_another_rank_is_no_finding(name):
    end = evolve(FOUND[name].end, rank=0)
    assert FAULTS[name]().finding(evolve(FOUND[name], end=end), RANK) is None


@pytest.mark.parametrize("is_victim", [True, False])
def test_of_the_ranks_that_commit_a_save_one_is_killed(monkeypatch, is_victim):
    killed = []
    monkeypatch.setattr(os, "kill", lambda *call: killed.append(call))
    FAULTS["save"]().before_commit(SimpleNamespace(is_victim=is_victim, mark=lambda: None))
    assert killed == [(os.getpid(), signal.SIGKILL)] * is_victim


def test_ranks_that_leave_during_the_work_at_the_end_are_objected_to():
    assert FAULTS["long-export"]().objection(evidence(records=[record(Event.WORKED, ranks=1)]))


def test_curves_are_compared_to_the_bit():
    curve = {1: 2.0, 2: math.nan, 3: 1.0}
    assert first_difference(curve, dict(curve)) is None
    assert first_difference(curve, {**curve, 3: math.nextafter(1.0, 2.0)}) == 3
    assert first_difference(curve, {1: 2.0, 2: math.nan}) == 3
    assert deviation(curve, {**curve, 3: 1.5}) == pytest.approx(1 / 3)
    assert deviation(curve, {1: 2.0}) == math.inf
    assert deviation(curve, {**curve, 2: 1.0}) == math.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
def test_a_flipped_bit_changes_the_largest_element_by_256(dtype):
    tensor = torch.tensor([[0.5, -1.5], [0.25, 1.0]], dtype=dtype)
    flip_bit(tensor)
    assert tensor[0, 1].abs().log2().sub(math.log2(1.5)).abs().item() == 8
    assert tensor.flatten()[[0, 2, 3]].tolist() == [0.5, 0.25, 1.0]
