"""`Summary.metrics()` and `read_metrics`: rows by step, evaluations apart, whatever happened to the run."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from forge_core import ForgeError, TrainingHook, read_metrics
from forge_core.metrics.jsonl import JsonLines
from forge_testing.refusals import naming, refuses


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
    with refuses("", f"{summary.folder}/job.toml", "Expected ']'"):
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
    with pytest.raises(ForgeError, match=naming(f"{tmp_path}/metrics.jsonl")):
        read_metrics(tmp_path)


def written(folder: Path, rows: Iterable[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_numbers_of_one_name_are_arrays_with_their_steps(tmp_path: Path):
    rows = [{"step": n, "loss": 2 * n, **({"mine": n / 2} if n % 2 else {})} for n in (1, 2, 3, 5, 4)]
    rows += [{"step": 3, "loss": 0.5, "mine": "nan"}, {"step": 4, "loss": 1, "skipped": True, "counts": {"a": [1]}}]
    metrics = read_metrics(written(tmp_path, rows))
    steps, values = metrics.column("loss")
    assert (steps.tolist(), values.tolist()) == ([1, 2, 3, 4, 5], [2, 4, 0.5, 1, 10])
    steps, values = metrics.column("mine")
    assert steps.tolist() == [1, 3, 5]
    assert math.isnan(values[1])
    assert metrics.column("absent")[0].tolist() == []
    assert metrics.numbers() == ["step", "loss", "mine"]
    assert metrics[-5] == metrics[0]
    assert metrics[4]["step"] == 5
    for place in (5, -6):
        with pytest.raises(IndexError, match=naming(f"row {place} of 5")):
            metrics[place]
    assert metrics[3] == {"step": 4, "loss": 1.0, "skipped": True, "counts": {"a": [1]}}
    assert [row["step"] for row in metrics.last_with("counts", 5)] == [4]


def test_a_million_lines_take_what_their_numbers_do_whatever_else_they_have(tmp_path: Path):
    names = [f"number/{number}" for number in range(10)]

    def size(count: int) -> int:
        counts = {"load": [[1.0] * 100]}
        rows = (
            {"step": n, "loss": 1 / n, "counts": counts, **dict.fromkeys(names, n / 7)} for n in range(1, count + 1)
        )
        folder = written(tmp_path / str(count), rows)
        tracemalloc.start()
        metrics = read_metrics(folder)
        taken = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert len(metrics) == count
        return taken

    size(100)  # what the first call imports
    of_line = (size(4000) - size(2000)) / 2000
    # 12 numbers and two of the line that has more; arrays grow by an eighth more than they need
    assert 8 * 14 <= of_line <= 8 * 14 * 1.2
