"""What TensorBoard shows of a run."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from forge_core.contracts.components import TrainingHook
from forge_plugin_tensorboard import TensorBoard
from forge_plugin_tensorboard.writer import TensorBoardLogger, heat_map
from forge_testing.processes import exit_code_of_fork


def shown(folder):
    """{tag: [(step, value), …]} as TensorBoard reads the files."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    found = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    return {tag: points for tag, points in found.items() if points}


@pytest.fixture
def log(tmp_path):
    """Start after `step`, write records, close; returns what TensorBoard then shows."""

    def run(step, *records):
        logger = TensorBoardLogger(tmp_path)
        logger.start(step)
        for record in records:
            logger.log(record)
        logger.close()
        return shown(tmp_path)

    return run


def test_a_run_shows_what_its_metrics_say(make_job, train, lines):
    summary = train(make_job(eval={"interval": 2}, loggers={"tensorboard": TensorBoard()}))
    found = shown(summary.folder / "tensorboard")
    records = lines(summary)
    assert [step for step, _ in found["train/loss"]] == [1, 2, 3, 4]
    for name in ("loss", "lr", "grad_norm", "tokens"):
        assert [value for _, value in found[f"train/{name}"]] == pytest.approx([record[name] for record in records])
    assert [step for step, _ in found["eval/loss"]] == [2, 4]
    assert found["eval/loss"][-1][1] == pytest.approx(summary.evaluation["eval/loss"])


def test_what_came_before_a_checkpoint_outlives_a_killed_process(tmp_path):
    def log_and_die():
        logger = TensorBoardLogger(tmp_path)
        logger.start(0)
        for step in range(1, 6):
            logger.log({"step": step, "loss": 2.0})
        logger.flush()  # as before a checkpoint
        os.kill(os.getpid(), signal.SIGKILL)

    assert exit_code_of_fork(log_and_die) == -signal.SIGKILL
    assert [step for step, _ in shown(tmp_path)["train/loss"]] == [1, 2, 3, 4, 5]


class Crash(TrainingHook):
    def on_step_end(self, context):
        if context.step == 4:
            raise RuntimeError("crash")


def test_a_continued_run_has_every_step_once(make_job, train):
    keys = {"steps": 6, "checkpoint": {"interval": 2}, "loggers": {"tensorboard": TensorBoard()}}
    with pytest.raises(RuntimeError, match="crash"):
        train(make_job(**keys), Crash())
    found = shown(train(make_job(**keys)).folder / "tensorboard")
    assert [step for step, _ in found["train/loss"]] == [1, 2, 3, 4, 5, 6]


def test_what_was_recorded_after_the_step_of_the_start_is_hidden(log):
    log(0, *({"step": step, "loss": 1.0} for step in range(1, 6)), {"step": 2, "eval/loss": 1.0})
    found = log(2, {"step": 3, "loss": 2.0})
    assert found == {"train/loss": [(1, 1.0), (2, 1.0), (3, 2.0)], "eval/loss": [(2, 1.0)]}


def test_a_run_from_nothing_hides_everything_of_one_before(log):
    log(0, {"step": 0, "eval/loss": 1.0}, {"step": 1, "loss": 1.0})
    assert log(0, {"step": 0, "eval/loss": 3.0}) == {"eval/loss": [(0, 3.0)]}


def test_an_evaluation_is_on_disk_at_once(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    logger.start(0)
    for record in ({"step": 1, "loss": 1.0}, {"step": 2, "loss": 1.0}, {"step": 2, "eval/loss": 2.0}):
        logger.log(record)
    assert shown(tmp_path) == {"train/loss": [(1, 1.0), (2, 1.0)], "eval/loss": [(2, 2.0)]}
    logger.close()


def test_a_number_whose_name_has_a_group_stays_in_it(log):
    assert list(log(0, {"step": 1, "loss": 1.0, "loss/source_0": 1.0})) == ["train/loss", "loss/source_0"]


def test_what_is_no_number_is_left_out(log):
    assert list(log(0, {"step": 1, "loss": 1.0, "note": "text"})) == ["train/loss"]


def test_numbers_that_are_not_finite_are_kept(log):
    found = log(0, {"step": 1, "loss": math.nan, "grad_norm": math.inf})
    assert math.isnan(found["train/loss"][0][1])
    assert found["train/grad_norm"] == [(1, math.inf)]


def test_importing_the_plugin_imports_neither_torch_nor_tensorboard():
    code = "import sys, forge_plugin_tensorboard; sys.exit(bool({'torch', 'tensorboard'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_counts_are_pictures(tmp_path):
    logger = TensorBoardLogger(tmp_path, picture_interval=2)
    logger.start(0)
    for step in (1, 2, 3, 4):
        logger.log({"step": step, "loss": 1.0, "counts": {"moe/load": {"0": [1.0, 3.0], "2": [0.0, 4.0]}}})
    logger.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Tags()["images"] == ["moe/load"]
    assert [picture.step for picture in events.Images("moe/load")] == [2, 4]
    assert (events.Images("moe/load")[0].width, events.Images("moe/load")[0].height) == (16, 16)


def test_a_heat_map_goes_from_the_smallest_to_the_largest():
    picture = heat_map({"0": [1.0, 3.0], "2": [0.0, 4.0]})
    assert picture.shape == (16, 16)
    assert picture[::8, ::8].tolist() == [[63, 191], [0, 255]]
    assert heat_map({"0": [2.0, 2.0]}).max() == 0
    assert heat_map({"0": [1.0], "1": [0.0, 2.0]})[::8, ::8].tolist() == [[127, 127], [0, 255]]
