"""Seconds by phase in the lines of metrics."""

from __future__ import annotations

import itertools
import time

import pytest

from forge_core import TrainingHook
from forge_core.engine.trainer import Trainer
from forge_testing import tiny_job

PREFIX = "seconds/"


class Sleeper(TrainingHook):
    """Takes time of its own in step 2."""

    def on_step_end(self, context):
        time.sleep(0.3 * (context.step == 2))


@pytest.fixture
def records(tmp_path, catalog):
    job = tiny_job(str(tmp_path), catalog, steps=4, checkpoint={"interval": 2})
    summary = Trainer(job, hooks=[Sleeper()], catalog=catalog, echo=lambda text: None).run()
    return summary.metrics()


def test_each_step_has_its_own_seconds(records):
    slept = [record.get(f"{PREFIX}hook_python.Sleeper", 0) for record in records]
    assert slept[1] > 0.3
    assert max(slept[0], *slept[2:]) < slept[1]  # no fixed limit: a busy machine may interrupt any of them
    assert all(record[f"{PREFIX}forward_and_backward"] > 0 for record in records)


def test_what_comes_between_two_lines_is_in_the_second(records):
    saving = [f"{PREFIX}save" in record for record in records]
    assert saving == [False, False, True, False]  # after step 2; the last save comes after the last line


def test_they_add_up_to_the_time_between_lines(records):
    for before, record in itertools.pairwise(records):
        total = sum(value for name, value in record.items() if name.startswith(PREFIX))
        assert total == pytest.approx(record["time"] - before["time"], abs=0.2)
