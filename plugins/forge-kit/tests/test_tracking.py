"""Which run of a service a run folder is."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

from attrs import evolve

from forge_kit.tools.tracking import TrackedRun, TrackerComponent, is_sent, numbers


def begin(folder, step, component=None, service="somewhere"):
    folder.mkdir(exist_ok=True)
    job = SimpleNamespace(job=SimpleNamespace(name="mine"))
    return TrackedRun.begin(component or TrackerComponent(), service, SimpleNamespace(folder=folder, job=job), step)


def test_a_run_that_continues_is_the_same_run_and_one_from_nothing_is_not(tmp_path):
    first, again, anew = (begin(tmp_path, step) for step in (0, 4, 0))
    assert (first.is_new, again.is_new, anew.is_new) == (True, False, True)
    assert first.id == again.id != anew.id
    assert (first.name, again.starts, again.attempt) == ("mine", [0, 4], 2)
    assert begin(tmp_path, 4).id == anew.id


def test_services_and_projects_are_apart_and_so_is_a_copied_folder_with_a_branch(tmp_path):
    original, component = begin(tmp_path / "run", 0), TrackerComponent(name="shown")
    assert begin(tmp_path / "run", 2, service="elsewhere").is_new
    assert begin(tmp_path / "run", 2, evolve(component, project="other")).is_new
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert begin(tmp_path / "copy", 2).id == original.id
    branched = begin(tmp_path / "copy", 2, evolve(component, branch="copy"))
    assert branched.is_new
    assert branched.id != original.id
    assert branched.name == "shown"
    assert begin(tmp_path / "copy", 4, evolve(component, branch="copy")).id == branched.id


def test_counts_are_sent_once_in_an_interval_whatever_lines_have_them(tmp_path):
    run = begin(tmp_path, 95)
    lines = [{"step": step, "counts": {"load": {"0": [1.0]}} if step % 7 == 0 else {}} for step in range(96, 310)]
    assert [line["step"] for line in lines if run.takes_counts(line, 100)] == [105, 203, 301]
    assert not run.takes_counts({"step": 700, "counts": {"load": {}}}, 0)


def test_what_is_sent_of_a_line():
    line = {"step": 3, "loss": 2, "time": 1e9, "source/a": 1.5, "counts": {}, "note": "text", "skipped": True}
    assert numbers(line) == {"train/loss": 2.0, "source/a": 1.5, "train/skipped": 1.0}
    assert [is_sent({"step": step, "loss": 1.0}, 2) for step in (1, 2)] == [False, True]
    assert is_sent({"step": 1, "eval/loss": 1.0}, 2)
