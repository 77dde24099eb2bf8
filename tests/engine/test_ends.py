"""`end.json`: how a run ended, for commands and schedulers."""

from __future__ import annotations

import gc
import json
import os
import signal
import time
import weakref

import pytest
import torch.distributed as dist

from forge_core.checkpoint.run_folder import RunFolder
from forge_core.contracts.components import TrainingHook
from forge_core.contracts.errors import JobError, NonFiniteError
from forge_core.contracts.run_end import Cause, End
from forge_core.engine.trainer import Trainer
from forge_core.parallel.stages import Replicate
from forge_testing import tiny_job
from forge_testing.processes import run_on_ranks


class At(TrainingHook):
    """Does something after a step."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_step_end(self, context):
        if context.step == self.step:
            self.action(context)


def fail(error):
    def action(context):
        raise error

    return action


def train(folder, *hooks, **keys):
    return Trainer(tiny_job(folder, **{"steps": 4, **keys}), hooks=hooks, echo=lambda text: None).run()


def end_of(folder) -> End:
    end = RunFolder(next(folder.glob("*/.lock")).parent).end()
    assert end is not None
    return end


def test_a_run_that_finished(tmp_path):
    before = time.time()
    train(tmp_path)
    end = end_of(tmp_path)
    assert (end.code, end.cause, end.reason, end.step, end.rank) == (0, Cause.FINISHED, "", 4, 0)
    assert before <= end.started <= end.ended <= time.time()
    assert end.host
    assert not end.final


def test_nothing_of_a_run_stays_in_memory(tmp_path):
    models = []
    hook = At(1, lambda context: models.append(weakref.ref(context.model)))
    Trainer(tiny_job(str(tmp_path)), hooks=[hook]).run()
    gc.collect()
    assert [model() for model in models] == [None]


def test_a_request_to_stop_is_one_line_with_its_cause(tmp_path):
    train(tmp_path, At(2, lambda context: context.request_stop("a fault:\n  rows are remapped", cause=Cause.TIME)))
    end = end_of(tmp_path)
    assert (end.code, end.cause, end.reason, end.step) == (75, Cause.TIME, "a fault: rows are remapped", 2)


def test_a_request_to_end_for_good(tmp_path):
    train(tmp_path, At(2, lambda context: context.request_stop("good enough", final=True)))
    end = end_of(tmp_path)
    assert (end.code, end.cause, end.final, end.step) == (0, Cause.REQUEST, True, 2)


def test_a_run_that_stop_after_ends_is_told_from_one_that_finished(tmp_path):
    train(tmp_path, stop_after=2)
    end = end_of(tmp_path)
    assert (end.code, end.cause, end.step) == (0, Cause.PLANNED, 2)


def test_a_signal_is_named(tmp_path):
    train(tmp_path, At(2, lambda context: os.kill(os.getpid(), signal.SIGTERM)))
    end = end_of(tmp_path)
    assert (end.code, end.cause, end.signal) == (75, Cause.SIGNAL, "SIGTERM")
    assert 2 <= end.step <= 3


@pytest.mark.parametrize(
    ("error", "code", "cause", "reason"),
    [
        (ValueError("first\nsecond"), 1, Cause.FAILED, "ValueError: first second"),
        (NonFiniteError("nan"), 76, Cause.NON_FINITE, "nan"),
        (JobError("hooks.x: wrong"), 2, Cause.BAD_JOB, "hooks.x: wrong"),
    ],
)
def test_an_error(tmp_path, error, code, cause, reason):
    with pytest.raises(type(error)):
        train(tmp_path, At(3, fail(error)))
    end = end_of(tmp_path)
    assert (end.code, end.cause, end.step, end.rank) == (code, cause, 3, 0)
    assert reason in end.reason
    assert "\n" not in end.reason


def test_the_next_start_removes_the_end_of_the_last(tmp_path):
    train(tmp_path, At(2, lambda context: context.request_stop("enough")))
    ends = []
    train(tmp_path, At(3, lambda context: ends.append(RunFolder(context.folder).end())))
    assert ends == [None]
    assert end_of(tmp_path).cause == Cause.FINISHED


def test_an_end_names_the_attempt_of_the_scheduler(tmp_path, monkeypatch):
    monkeypatch.setenv("FORGE_ATTEMPT", "17.2")
    train(tmp_path)
    assert end_of(tmp_path).attempt == "17.2"


def test_the_rank_that_failed_is_in_the_end(tmp_path):
    def fail_on_rank_1(context):
        if dist.get_rank() == 1:
            raise ValueError("rank one")

    with pytest.raises(AssertionError, match="rank one"):
        run_on_ranks(2, lambda rank: train(tmp_path, At(2, fail_on_rank_1), parallel={"replicate": Replicate()}))
    end = end_of(tmp_path)
    assert (end.rank, end.code, end.step) == (1, 1, 2)


def test_an_end_of_a_later_version_and_a_damaged_one(tmp_path):
    path = tmp_path / "end.json"
    path.write_text(json.dumps({"code": 0, "cause": "finished", "of_a_later_version": 1}))
    assert RunFolder(tmp_path).end().code == 0
    path.write_text('{"code": 0')
    assert RunFolder(tmp_path).end() is None
