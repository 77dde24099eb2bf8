"""Saves that fail, for real: no room, or no folder."""

from __future__ import annotations

import re
import resource
import time
import warnings
from types import SimpleNamespace
from typing import ClassVar

import pytest
from attrs import define, field

from forge_core.checkpoint.manager import Saver
from forge_core.contracts.components import TrainingHook
from forge_core.contracts.errors import CheckpointError
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import lacks, naming

ROOM = 16_000
"""Bytes that a file may have while the disk is `full`: enough for the manifest and the metrics, not for the tensors."""


@define(kw_only=True, slots=False)
class FullDisk(TrainingHook):
    """From one step to before another, files of this process cannot grow beyond some bytes."""

    start: int
    end: int = 10**9
    bytes: int = ROOM
    ended: bool = field(init=False, default=False)
    saver: ClassVar[Saver]

    def on_step_begin(self, context):
        while self.saver.writing:  # what was asked before is not concerned
            time.sleep(0.01)
        full = self.start <= context.step < self.end
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.bytes if full else resource.RLIM_INFINITY, -1))

    def on_train_end(self, context):
        self.ended = True


@pytest.fixture(autouse=True)
def watched(monkeypatch):
    """Lets `FullDisk` see the saver of the run."""

    class Watched(Saver):
        def __init__(self, *args):
            super().__init__(*args)
            monkeypatch.setattr(FullDisk, "saver", self, raising=False)

    monkeypatch.setattr("forge_core.engine.loop.Saver", Watched)


def attempt(train, job, *hooks):
    """Train; returns the error, if any, and the warnings."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            train(job, *hooks)
            error = ""
        except CheckpointError as failure:
            error = str(failure)
    texts = [str(warning.message) for warning in told]
    return error, [text for text in texts if re.search(naming("/checkpoints"), text)]


def step_of(message):
    """The step of a save that failed, by its message."""
    return int(re.search(r"\bstep (\d+)\b", message)[1])


def curve(records):
    return [(record["step"], record["loss"], record["grad_norm"]) for record in records]


def records_of(tmp_path, lines, name="run"):
    return lines(SimpleNamespace(folder=tmp_path / name))


def left_in(tmp_path, name="run"):
    return sorted(path.name for path in (tmp_path / name / "checkpoints").glob("*"))


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def make_job_(request, make_job):
    def make(checkpoint, **changes):
        return make_job(steps=6, checkpoint={"interval": 2, "async_save": request.param, **checkpoint}, **changes)

    return make


@pytest.mark.parametrize("ranks", [1, 2])
class TestOnAFullDisk:
    def test_stop_ends_the_run_and_leaves_what_was_saved(self, make_job_, train, lines, tmp_path, ranks):
        job = make_job_({"on_failure": "stop"})

        def work(rank):
            disk = FullDisk(start=4, bytes=ROOM if rank == ranks - 1 else 10**9)
            error, _ = attempt(train, job, disk)
            left, disk.start = left_in(tmp_path), 10**9
            attempt(train, job, disk)
            return error, left

        errors, left = zip(*run_on_ranks(ranks, work), strict=True)
        assert step_of(errors[0]) == 4
        assert not lacks(errors[0], f"{tmp_path}/run/checkpoints", f"rank {ranks - 1}")
        assert f"step-4.tmp/__{ranks - 1}_0.distcp" in errors[0]
        assert not lacks(errors[0], "OSError: [Errno 27] File too large", "GB", "steps 2")
        assert errors == ranks * errors[:1]
        assert left[0] == ["step-2"]
        assert [record["step"] for record in records_of(tmp_path, lines)] == [1, 2, 3, 4, 5, 6]

    def test_continue_warns_goes_on_and_tries_again(self, make_job_, train, lines, tmp_path, ranks):
        def work(rank):
            attempt(train, make_job_({}, job={"name": "straight"}))
            disk = FullDisk(start=2, end=5, bytes=ROOM if rank == ranks - 1 else 10**9)
            return attempt(train, make_job_({"on_failure": "continue"}), disk)

        first, *others = run_on_ranks(ranks, work)
        error, told = first
        assert error == ""
        assert [step_of(text) for text in told] == [2, 4]
        assert ["steps" in text for text in told] == [False, False], "there is no earlier checkpoint to name"
        assert others == [("", [])] * (ranks - 1)
        assert left_in(tmp_path) == ["step-6"]
        assert curve(records_of(tmp_path, lines)) == curve(records_of(tmp_path, lines, "straight"))

    def test_the_last_save_must_succeed(self, make_job_, train, tmp_path, ranks):
        def work(rank):
            disk = FullDisk(start=5, bytes=ROOM if rank == ranks - 1 else 10**9)
            return *attempt(train, make_job_({"on_failure": "continue"}), disk), disk.ended

        for error, told, ended in run_on_ranks(ranks, work):
            assert step_of(error) == 6
            assert told == []
            assert ended, "hooks may still put the weights elsewhere"
        assert left_in(tmp_path) == ["step-2", "step-4"]


@pytest.mark.parametrize("on_failure", ["stop", "continue"])
def test_a_file_where_the_folder_should_be_is_a_failed_save(make_job_, train, tmp_path, on_failure):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").write_text("not a folder")
    error, told = attempt(train, make_job_({"on_failure": on_failure}))
    assert step_of(error) == (2 if on_failure == "stop" else 6)
    assert not lacks(error, f"{tmp_path}/run/checkpoints")
    assert "NotADirectoryError" in error or "FileExistsError" in error
    assert len(told) == (0 if on_failure == "stop" else 2)


def test_metrics_that_do_not_fit_on_the_disk_are_written_later(make_job_, train, lines, tmp_path):
    def work(rank):
        return attempt(train, make_job_({"on_failure": "continue"}), FullDisk(start=2, end=5, bytes=300))

    ((error, told),) = run_on_ranks(1, work)
    assert error == ""
    assert [step_of(text) for text in told] == [2, 4]
    assert [record["step"] for record in records_of(tmp_path, lines)] == [1, 2, 3, 4, 5, 6]


def test_a_checkpoint_is_not_committed_before_its_metrics_are_on_the_disk(make_job_, train, tmp_path):
    def work(rank):
        return attempt(train, make_job_({}), FullDisk(start=2, bytes=300))

    ((error, _),) = run_on_ranks(1, work)
    assert step_of(error) == 2
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(
    ("odd", "facts"),
    [(object(), ["type object", "JSON"]), ([{100: 2.5}], ["extras.hook:python.Odd.value", 100])],
)
def test_state_that_would_not_come_back_as_it_is_is_a_failed_save(make_job_, train, odd, facts):
    @define(kw_only=True, slots=False)
    class Odd(TrainingHook):
        value: object = field(init=False, default=odd)

    error, _ = attempt(train, make_job_({}), Odd())
    assert step_of(error) == 2
    assert not lacks(error, *facts)
