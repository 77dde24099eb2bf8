"""Evaluations and loggers of strangers: what they may return, and who is named when they fail."""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import Any

import pytest
import torch
from attrs import define, evolve, field, frozen

from forge_core.contracts.components import EvaluationComponent, LoggerComponent, TrainingHook
from forge_core.contracts.errors import ExitCode, ForgeError, JobError, NonFiniteError, Problem
from forge_core.metrics.console import Console
from forge_testing import Numbers
from forge_testing.refusals import naming, refuses

VALUES = {
    "int": 2,
    "float": 2.0,
    "scalar": torch.tensor(2.0),
    "one element": torch.full((1,), 2),
    "vector": torch.ones(3),
    "text": "good",
    "nothing": None,
}


@frozen(kw_only=True)
class Returns(EvaluationComponent):
    """An evaluation that returns one metric."""

    value: str

    def evaluate(self, context):
        return {"mine/score": VALUES[self.value]}


@pytest.mark.parametrize("value", ["int", "float", "scalar", "one element"])
def test_a_metric_may_be_any_scalar(make_job, train, value):
    job = make_job(steps=1, evaluations={"mine": Returns(value=value)}, loggers={"console": Console(style="plain")})
    assert train(job).evaluation["mine/score"] == 2.0


@pytest.mark.parametrize(
    ("value", "kind"), [("vector", "tensor of shape (3,)"), ("text", "'good'"), ("nothing", "None")]
)
def test_a_metric_that_is_no_number_is_refused_by_name(make_job, train, value, kind):
    with pytest.raises(ForgeError, match=naming("'mine/score'", kind)) as caught:
        train(make_job(steps=1, evaluations={"mine": Returns(value=value)}))
    assert any(note.startswith("in evaluations.mine (") for note in caught.value.__notes__)


@frozen(kw_only=True)
class Counts(EvaluationComponent):
    """An evaluation that builds what it keeps between its calls."""

    refuses: bool = False

    def build(self, context):
        if self.refuses:
            raise JobError([Problem("source", "has no rows")])
        calls = itertools.count(1)
        return lambda given: {"mine/calls": next(calls), "mine/step": given.step}


def test_an_evaluation_is_built_once_a_run_and_keeps_what_it_built(make_job, train):
    evaluation = Counts()
    for name in ("one", "two"):  # the same component in both
        summary = train(make_job(steps=2, job={"name": name}, eval={"interval": 1}, evaluations={"mine": evaluation}))
        assert [row["mine/calls"] for row in summary.metrics().evaluations] == [1, 2]


def test_what_an_evaluation_cannot_build_ends_the_run_before_the_model_is_built(make_job, train):
    with refuses("evaluations.mine.source", "has no rows"):
        train(make_job(steps=1, evaluations={"mine": Counts(refuses=True)}))


@frozen(kw_only=True)
class Raises(EvaluationComponent):
    def evaluate(self, context):
        raise ValueError("no such task")


def test_an_evaluation_that_raises_is_named(make_job, train):
    with pytest.raises(ValueError, match="no such task") as caught:
        train(make_job(steps=1, evaluations={"arc": Raises()}))
    [note] = [note for note in caught.value.__notes__ if "evaluations" in note]
    assert note.startswith("in evaluations.arc (")
    assert note.endswith("test_evaluations_and_loggers:Raises)")


@define
class Failing:
    """Raises in one of its methods."""

    method: str

    def start(self, step):
        self._reach("start")

    def log(self, record):
        self._reach("log")

    def flush(self):
        self._reach("flush")

    def close(self):
        """Nothing to close."""

    def _reach(self, method):
        if method == self.method:
            raise RuntimeError("the tracker is gone")


@frozen(kw_only=True)
class FailingLogger(LoggerComponent):
    method: str

    def build(self, context):
        return Failing(self.method)


@pytest.mark.parametrize("method", ["start", "log"])
def test_a_logger_that_raises_is_named(make_job, train, method):
    with pytest.raises(RuntimeError, match="the tracker is gone") as caught:
        train(make_job(steps=1, loggers={"tracker": FailingLogger(method=method)}))
    assert any(note.startswith("in loggers.tracker (") for note in caught.value.__notes__)


def test_a_logger_that_cannot_flush_fails_the_save_and_is_named(make_job, train):
    with pytest.raises(Exception, match="the tracker is gone") as caught:
        train(make_job(steps=1, loggers={"tracker": FailingLogger(method="flush")}))
    chain, notes = caught.value, []
    while chain is not None:
        notes += getattr(chain, "__notes__", [])
        chain = chain.__cause__
    assert any(note.startswith("in loggers.tracker (") for note in notes)


@define
class Diary:
    """Keeps artefacts and the end: everything that a logger may learn."""

    events: list

    def start(self, step):
        pass

    def log(self, record):
        pass

    def artifact(self, path, name, step):
        self.events.append((name, step, path.read_text()))

    def end(self, code, reason):
        self.events.append((code, reason))

    def close(self):
        self.events.append("closed")


@frozen(kw_only=True)
class DiaryLogger(LoggerComponent):
    events: list = field(factory=list)

    def build(self, context):
        return Diary(self.events)


class HandsOn(TrainingHook):
    """Hands on a file that changes, by its own name and by a given one."""

    def on_step_end(self, context):
        path = context.folder / "note.txt"
        path.write_text(f"after {context.step}")
        context.log_artifact(path)

    def on_train_end(self, context):
        context.log_artifact(context.folder / "note.txt", "the end")


class EndsAt(TrainingHook):
    def __init__(self, **request):
        self.request = request

    def on_step_end(self, context):
        if self.request:
            context.request_stop(**self.request)
        else:
            raise NonFiniteError("lost")


def test_hooks_hand_files_to_the_loggers_that_take_them(make_job, train):
    diary = DiaryLogger()
    train(make_job(steps=2, loggers={"diary": diary, "console": Console(style="plain")}), HandsOn())
    files = [("note.txt", 1, "after 1"), ("note.txt", 2, "after 2"), ("the end", 2, "after 2")]
    assert diary.events == [*files, (ExitCode.FINISHED, ""), "closed"]


@pytest.mark.parametrize(
    ("hook", "end"),
    [
        (EndsAt(reason="time"), (ExitCode.STOPPED, "time")),
        (EndsAt(reason="good enough", final=True), (ExitCode.FINISHED, "good enough")),
        (EndsAt(), (ExitCode.NON_FINITE, "NonFiniteError: lost")),
    ],
    ids=["to be continued", "for good", "error"],
)
def test_a_logger_learns_how_the_run_ended_before_it_is_closed(make_job, train, hook, end):
    diary = DiaryLogger()
    with suppress(NonFiniteError):
        train(make_job(steps=3, loggers={"diary": diary}), hook)
    assert diary.events == [end, "closed"]


def test_a_logger_is_closed_and_receives_the_error_if_a_later_one_does_not_start(make_job, train):
    diary = DiaryLogger()
    with pytest.raises(RuntimeError, match="the tracker is gone"):
        train(make_job(steps=1, loggers={"diary": diary, "tracker": FailingLogger(method="start")}))
    assert diary.events == [(ExitCode.FAILED, "RuntimeError: the tracker is gone"), "closed"]


def test_a_logger_that_fails_at_the_end_is_named_and_closed(make_job, train, monkeypatch):
    diary = DiaryLogger()
    monkeypatch.setattr(Diary, "end", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        train(make_job(steps=1, loggers={"diary": diary}))
    assert any(note.startswith("in loggers.diary (") for note in caught.value.__notes__)
    assert diary.events == ["closed"]


def test_an_artifact_that_cannot_be_read_is_a_warning(make_job, train):
    class Lost(TrainingHook):
        def on_train_end(self, context):
            context.log_artifact(context.folder / "missing.txt")

    diary = DiaryLogger()
    with pytest.warns(UserWarning, match=r"loggers\.diary .*missing\.txt"):
        train(make_job(steps=1, loggers={"diary": diary}), Lost())
    assert diary.events == [(ExitCode.FINISHED, ""), "closed"]


@frozen(kw_only=True)
class Unlabelled(Numbers):
    """`Numbers` whose held-out rows have no label, such as prompts."""

    def build(self, context):
        training = super().build(context)
        return evolve(training, held_out=WithoutLabels(training.held_out))


@frozen
class WithoutLabels:
    rows: Any
    held_out = None
    bytes_per_token = None

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        return {**row, "labels": row["labels"] * 0 - 100}


def test_held_out_rows_without_labels_have_no_loss(make_job, train):
    assert train(make_job(data={"sources": (Numbers(),)})).evaluation["eval/loss"] > 0
    assert train(make_job(job={"name": "unlabelled"}, data={"sources": (Unlabelled(),)})).evaluation == {}
