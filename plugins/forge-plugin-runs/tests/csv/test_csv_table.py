"""The table, as pandas and Python's own reader see it."""

from __future__ import annotations

import csv
import math

import pandas
import pytest

from forge_plugin_runs.csv import Csv
from forge_plugin_runs.csv.table import CsvLogger


def started(path, step=0, *records):
    logger = CsvLogger(path)
    logger.start(step)
    for record in records:
        logger.log(record)
    return logger


def rows(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_the_table_of_a_run_has_the_numbers_of_its_lines(make_job, train, lines):
    summary = train(make_job(eval={"interval": 2}, loggers={"csv": Csv()}))
    table = pandas.read_csv(summary.folder / "metrics.csv")
    steps, evaluations = table[table["loss"].notna()], table[table["eval/loss"].notna()]
    assert steps["step"].tolist() == [1, 2, 3, 4]
    for name in ("loss", "lr", "grad_norm", "tokens", "time"):
        assert steps[name].tolist() == pytest.approx([record[name] for record in lines(summary)], rel=1e-14), name
    assert evaluations["step"].tolist() == [2, 4]
    assert evaluations["eval/loss"].iloc[-1] == pytest.approx(summary.evaluation["eval/loss"], rel=1e-14)


def test_a_column_that_comes_later_leaves_no_row_short_and_none_out(tmp_path):
    path = tmp_path / "t.csv"
    started(
        path,
        0,
        {"step": 1, "loss": 1.5},
        {"step": 1, 'odd, "name"\n': 2},
        {"step": 2, "b": math.nan, "loss": -math.inf},
    )
    assert rows(path) == [
        ["step", "loss", 'odd, "name"\n', "b"],
        ["1", "1.5", "", ""],
        ["1", "", "2", ""],
        ["2", "-inf", "", "nan"],
    ]


def test_a_continued_table_keeps_its_columns_and_drops_stale_and_torn_rows(tmp_path):
    path = tmp_path / "t.csv"
    started(path, 0, *({"step": step, "loss": step / 2, "eval/x": 1} for step in (1, 2, 3))).close()
    path.write_bytes(path.read_bytes() + b"2,2.")
    started(path, 2, {"step": 3, "loss": 9.0})
    assert rows(path) == [["step", "loss", "eval/x"], ["1", "0.5", "1"], ["2", "1.0", "1"], ["3", "9.0", ""]]


@pytest.fixture
def full_disk(monkeypatch):
    """Half of each row fits, while the fixture's flag is set."""

    class Disk:
        full = False

    class File:
        def __init__(self, file):
            self.file = file

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, text):
            return self.file.write(text[: len(text) // 2] if Disk.full else text)

    rewrite = CsvLogger._rewrite
    monkeypatch.setattr(
        CsvLogger, "_rewrite", lambda self, rows: (rewrite(self, rows), setattr(self, "_file", File(self._file)))
    )
    return Disk


def test_a_row_that_did_not_fit_on_the_disk_is_written_whole_with_a_later_one(tmp_path, full_disk):
    logger = started(tmp_path / "t.csv", 0, {"step": 1, "loss": 1.0})
    full_disk.full = True
    with pytest.raises(OSError, match=r"no room .*t\.csv"):
        logger.log({"step": 2, "loss": 2.0})
    assert rows(tmp_path / "t.csv")[1:] == [["1", "1.0"]]
    full_disk.full = False
    logger.log({"step": 3, "loss": 3.0})
    assert rows(tmp_path / "t.csv")[1:] == [["1", "1.0"], ["2", "2.0"], ["3", "3.0"]]
