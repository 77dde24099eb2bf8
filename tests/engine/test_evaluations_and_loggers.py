"""Evaluations and loggers of strangers: what they may return, and who is named when they fail."""

from __future__ import annotations

import pytest
import torch
from attrs import define, frozen

from forge_core.contracts.components import EvaluationComponent, LoggerComponent
from forge_core.contracts.errors import ForgeError
from forge_core.metrics.console import Console

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
    ("value", "kind"), [("vector", r"a tensor of shape \(3,\)"), ("text", "'good'"), ("nothing", "None")]
)
def test_a_metric_that_is_no_number_is_refused_by_name(make_job, train, value, kind):
    with pytest.raises(ForgeError, match=f"the metric 'mine/score' is {kind}") as caught:
        train(make_job(steps=1, evaluations={"mine": Returns(value=value)}))
    assert any(note.startswith("in evaluations.mine (") for note in caught.value.__notes__)


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
