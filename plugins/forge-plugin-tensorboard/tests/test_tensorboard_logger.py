"""What TensorBoard reads back from a run."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from forge_core.protocols import Logger
from forge_plugin_tensorboard import TensorBoard


def open_logger(folder: Path, step: int = 0) -> Logger:
    logger = TensorBoard().build(SimpleNamespace(folder=folder))
    logger.start(step)
    return logger


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """{tag: {step: value}} as TensorBoard shows it."""
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_every_number_of_a_line_is_a_scalar_in_its_group(tmp_path: Path) -> None:
    logger = open_logger(tmp_path)
    logger.log({"step": 3, "loss": 2.5, "tokens": 4096, "moe/balance": 0.5})
    logger.log({"step": 4, "eval/loss": 2.25})
    logger.close()
    assert scalars(tmp_path) == {
        "train/loss": {3: 2.5},
        "train/tokens": {3: 4096},
        "moe/balance": {3: 0.5},
        "eval/loss": {4: 2.25},
    }


def test_numbers_that_are_not_finite_are_kept_and_what_is_no_number_is_left_out(tmp_path: Path) -> None:
    logger = open_logger(tmp_path)
    logger.log({"step": 1, "loss": math.nan, "note": "skipped"})
    logger.close()
    found = scalars(tmp_path)
    assert list(found) == ["train/loss"]
    assert math.isnan(found["train/loss"][1])


def test_an_evaluation_is_on_disk_at_once(tmp_path: Path) -> None:
    logger = open_logger(tmp_path)
    logger.log({"step": 1, "loss": 3.0})
    logger.log({"step": 1, "eval/loss": 2.0})
    assert scalars(tmp_path) == {"train/loss": {1: 3.0}, "eval/loss": {1: 2.0}}
    logger.close()


def test_a_continued_run_hides_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    first = open_logger(tmp_path)
    for step in range(1, 6):
        first.log({"step": step, "loss": float(step)})
    first.close()
    second = open_logger(tmp_path, step=3)
    second.log({"step": 4, "loss": 40.0})
    second.close()
    assert scalars(tmp_path)["train/loss"] == {1: 1.0, 2: 2.0, 3: 3.0, 4: 40.0}


def test_a_run_can_be_read_back(make_job: Any, train: Any, lines: Any) -> None:
    job = make_job(steps=3, loggers={"tensorboard": TensorBoard()})
    summary = train(job)
    expected = {line["step"]: pytest.approx(line["loss"]) for line in lines(summary)}
    assert scalars(summary.folder)["train/loss"] == expected


def test_flush_seconds_must_be_positive() -> None:
    with pytest.raises(ValueError, match="flush_seconds"):
        TensorBoard(flush_seconds=0)


def test_importing_the_plugin_needs_neither_torch_nor_tensorboard() -> None:
    code = "import sys, forge_plugin_tensorboard; sys.exit(bool({'torch', 'tensorboard'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
