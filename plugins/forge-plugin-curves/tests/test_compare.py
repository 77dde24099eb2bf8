"""`forge-run compare`, on jobs that train in a moment."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from matplotlib.image import imread

from forge_core.cli import main
from forge_core.contracts.errors import JobError
from forge_plugin_curves.compare.grid import read_setting, trials_of
from forge_plugin_curves.compare.results import read_outcome, rows_of
from forge_testing import TINY_JOB


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(TINY_JOB)
    return tmp_path


def lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_grid_is_run_once_and_the_best_is_first(folder, capfd):
    grid = ["compare", "job.toml", "--set", "optimizer.lr=1e-4,3e-2", "--set", "job.seed=1,2", "--out", "out"]
    assert main(grid) == 0
    runs = {path.name: lines(path) for path in Path("out/runs").iterdir()}
    assert sorted(runs) == ["lr-1e-4-seed-1", "lr-1e-4-seed-2", "lr-3e-2-seed-1", "lr-3e-2-seed-2"]
    held_out = {name: found[-1]["eval/loss"] for name, found in runs.items()}
    best, other = ([held_out[f"lr-{lr}-seed-{seed}"] for seed in (1, 2)] for lr in ("3e-2", "1e-4"))
    table = Path("out/comparison.md").read_text().splitlines()
    assert table[2].startswith(f"| lr 3e-2 | 2 | {statistics.mean(best):.4f} ± {statistics.stdev(best):.4f} | ")
    assert table[3].startswith(f"| lr 1e-4 | 2 | {statistics.mean(other):.4f} ± {statistics.stdev(other):.4f} | ")
    assert imread("out/comparison.png").std() > 0.01
    assert "1/4  lr 1e-4, seed 1  loss " in capfd.readouterr().out
    assert main([*grid[:3], "optimizer.lr=1e-4", *grid[4:]]) == 0
    assert runs == {path.name: lines(path) for path in Path("out/runs").iterdir()}, "what is finished is not run again"


@pytest.mark.slow
def test_a_run_that_fails_is_named_and_the_others_are_compared(folder, capfd):
    (folder / "failing.toml").write_text(
        TINY_JOB
        + """
[hooks.failing]
type = "./failing.py:Failing"
"""
    )
    (folder / "failing.py").write_text(
        "from attrs import define\nfrom forge_core import TrainingHook\n"
        "@define(kw_only=True, slots=False)\nclass Failing(TrainingHook):\n"
        "    def on_step_end(self, context):\n        raise ValueError('the flux is out of bounds')\n"
    )
    assert main(["compare", "failing.toml", "job.toml", "--out", "out"]) == 1
    seen = capfd.readouterr()
    assert "1/2  failing  exit code 1" in seen.out
    assert "1 of 2 runs failed: failing; see out/logs" in seen.err
    assert "the flux is out of bounds" in Path("out/logs/failing.log").read_text()
    assert "| job | " in Path("out/comparison.md").read_text()


def test_nothing_is_started_if_any_job_is_wrong(folder, capsys):
    assert (
        main(["compare", "job.toml", "--set", "optimizer.lr=1e-3,fast", "--set", "train.stps=1", "--out", "out"]) == 2
    )
    seen = capsys.readouterr().err
    assert "optimizer.lr" in seen
    assert "unknown key; did you mean 'steps'?" in seen
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("optimizer.lr=1e-3, 3e-4", ("optimizer.lr", ["1e-3", "3e-4"])),
        ("optimizer.betas=[0.9, 0.95],[0.8, 0.9]", ("optimizer.betas", ["[0.9, 0.95]", "[0.8, 0.9]"])),
        ('optimizer={type = "adamw", lr = 1.0},{type = "muon"}',
         ("optimizer", ['{type = "adamw", lr = 1.0}', '{type = "muon"}'])),
        ('job.note="a,b",c', ("job.note", ['"a,b"', "c"])),
    ],
)  # fmt: skip
def test_values_are_divided_at_commas_outside_of_brackets_and_quotes(text, expected):
    assert read_setting(text) == expected


@pytest.mark.parametrize("text", ["optimizer.lr", "=1", "optimizer.lr=1,,2", "optimizer.lr=1,1"])
def test_a_setting_that_cannot_be_read_is_refused(text):
    with pytest.raises(JobError, match="--set"):
        read_setting(text)


def test_names_do_not_depend_on_what_else_is_compared():
    few = trials_of([Path("a.toml")], ["optimizer.lr=1"], [], Path("out"))
    many = trials_of([Path("a.toml")], ["optimizer.lr=2,1"], [], Path("out"))
    assert few[0].name == many[1].name == "lr-1"
    assert len({trial.name for trial in trials_of([Path("x/a.toml"), Path("y/a.toml")], [], [], Path("out"))}) == 2


def test_losses_that_are_not_finite_come_last(tmp_path):
    trials = trials_of([Path("a.toml")], ["optimizer.lr=1,2,3"], [], Path("out"))
    for trial, loss in zip(trials, ["NaN", "2.0", "1.0"], strict=True):
        (tmp_path / trial.name).mkdir()
        line = f'{{"step": 1, "loss": {loss}, "tokens": 8, "step_seconds": 0.1}}'
        (tmp_path / trial.name / "metrics.jsonl").write_text(line + "\n")
    rows = rows_of([read_outcome(trial, tmp_path / trial.name, "") for trial in trials])
    assert [row.cell.label for row in rows] == ["lr 3", "lr 2", "lr 1"]
