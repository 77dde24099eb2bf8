"""`Summary.metrics()` and `read_metrics`: rows by step, evaluations apart, whatever happened to the run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from forge_core import ForgeError, JobError, TrainingHook, read_metrics
from forge_core.metrics.jsonl import JsonLines


class Stop(TrainingHook):
    """Stops after step 3."""

    def on_step_end(self, context):
        if context.step == 3:
            context.request_stop("enough")


def test_there_is_a_row_for_each_step_and_one_for_each_evaluation(make_job, train):
    summary = train(make_job(steps=4, eval={"interval": 2}))
    metrics = summary.metrics()
    assert [row["step"] for row in metrics] == [1, 2, 3, 4]
    assert metrics[-1]["loss"] == summary.loss
    assert [row["step"] for row in metrics.evaluations] == [2, 4]
    assert metrics.evaluations[-1] == {"step": 4, **summary.evaluation}
    assert not any("eval/loss" in row for row in metrics)


def test_a_run_that_was_continued_has_each_step_once(make_job, train):
    job = make_job(steps=6, eval={"interval": 3})
    assert train(job, Stop()).step == 3
    metrics = train(job).metrics()
    assert [row["step"] for row in metrics] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in metrics.evaluations] == [3, 6]
    assert read_metrics(f"{job.job.output}/{job.job.name}") == metrics


def test_metrics_are_read_where_the_logger_writes_them(make_job, train):
    summary = train(make_job(steps=3, loggers={"jsonl": JsonLines(file="lines.jsonl")}))
    assert [row["step"] for row in summary.metrics()] == [1, 2, 3]
    assert read_metrics(summary.folder) == read_metrics(summary.folder / "lines.jsonl")


def test_a_damaged_job_is_named(make_job, train):
    summary = train(make_job(steps=1))
    (summary.folder / "job.toml").write_text("[job")
    with pytest.raises(JobError, match=r"job\.toml cannot be read: Expected"):
        summary.metrics()


def test_lines_of_a_killed_process_are_read_as_far_as_they_are_whole(tmp_path: Path):
    rows = [{"step": 1, "loss": "nan"}, {"step": 2, "loss": 3.0, "mine": "a word"}, {"step": 2, "loss": 4.0}]
    rows += [{"step": 2, "eval/loss": 1.0}, {"step": 2, "other/score": "inf"}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3, "lo')
    metrics = read_metrics(tmp_path)
    assert math.isnan(metrics[0]["loss"])
    assert metrics[1:] == [{"step": 2, "loss": 4.0, "mine": "a word"}]
    assert metrics.evaluations == [{"step": 2, "eval/loss": 1.0, "other/score": math.inf}]
    assert read_metrics(str(tmp_path / "metrics.jsonl")).evaluations == metrics.evaluations


def test_pandas_makes_tables_of_it(make_job, train):
    pandas = pytest.importorskip("pandas")
    metrics = train(make_job(steps=3, eval={"interval": 2})).metrics()
    frame = pandas.DataFrame(metrics).set_index("step")
    assert list(frame.index) == [1, 2, 3]
    assert frame["loss"].dtype == "float64"
    assert list(pandas.DataFrame(metrics.evaluations)["step"]) == [2, 3]


def test_a_folder_without_metrics_is_named(tmp_path: Path):
    with pytest.raises(ForgeError, match=r"metrics\.jsonl does not exist; give a run folder, or the file"):
        read_metrics(tmp_path)
