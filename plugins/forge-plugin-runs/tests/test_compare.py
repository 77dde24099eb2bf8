"""`forge-run compare`, on jobs that train in a moment."""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from matplotlib.image import imread

from forge_core.cli import main
from forge_core.contracts.errors import ExitCode, ForgeError, JobError
from forge_core.job import EvalSection
from forge_plugin_runs.compare import child, picture, processes
from forge_plugin_runs.compare.grid import (
    Cell,
    Distribution,
    Trial,
    existing,
    label_of,
    read_setting,
    read_space,
    trials_of,
)
from forge_plugin_runs.compare.halving import kept, rungs_of
from forge_plugin_runs.compare.processes import Finished, Processes
from forge_plugin_runs.compare.record import Record
from forge_plugin_runs.compare.results import CellResult, Outcome, read_outcome, rows_of
from forge_plugin_runs.compare.search import Search
from forge_testing import TINY_JOB
from forge_testing.refusals import lacks, naming, refuses

EVALUATED = f"{TINY_JOB.replace('steps = 4', 'steps = 8')}[eval]\ninterval = 1\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(TINY_JOB)
    return tmp_path


@pytest.fixture
def started(monkeypatch):
    """Runs are trained in this process; returns the names of those that were started, each with where it stops."""
    names: list[tuple[str, int]] = []

    def run(self, trials, stop_at, on_end):
        for trial in trials:
            names.append((trial.name, stop_at))
            words = [str(trial.cell.job), *trial.overrides, "--loggers.console.style=off"]
            code = child.main([str(stop_at), *words]) if stop_at else main(["run", *words])
            on_end(Finished(trial=trial, code=code, cpu_seconds=1.5, peak_memory=10_000_000))
        return True

    monkeypatch.setattr(Processes, "run", run)
    return names


def lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]


@pytest.mark.slow
def test_processes_train_a_grid_side_by_side_and_the_best_is_first(folder, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    grid = ["compare", "job.toml", "--set", "optimizer.lr=1e-4,3e-2", "--out", "out", "--parallel", "2"]
    assert main(grid) == 0
    names = ["optimizer.lr-1e-4", "optimizer.lr-3e-2"]
    assert sorted(path.name for path in Path("out/runs").iterdir()) == names
    held_out = [lines(Path("out/runs") / name)[-1]["eval/loss"] for name in names]
    head, best, other = rows(Path("out/comparison.md").read_text())
    losses = ["held-out loss", "difference", "training loss", "mean loss, last 5 %"]
    assert head[1:] == [*losses, "steps", "tokens", "s/step", "CPU s", "memory"]
    assert best[:3] == ["optimizer.lr=3e-2", f"{held_out[1]:.4f}", "best"]
    assert other[:3] == ["optimizer.lr=1e-4", f"{held_out[0]:.4f}", f"{held_out[0] - held_out[1]:+.4f}"]
    for row in (best, other):  # as wait4 reports them
        assert float(row[-2]) > 0
        assert int(row[-1].removesuffix(" MB").replace(",", "")) > 50
    assert imread("out/comparison.png").std() > 0.01
    seen = capfd.readouterr().out
    assert "1/2  optimizer.lr=" in seen
    assert "| optimizer.lr=3e-2 | " in seen


def test_repetitions_are_one_row(folder, started):
    assert main(["compare", "job.toml", "--set", "optimizer.lr=1e-4", "--set", "job.seed=1,2", "--out", "out"]) == 0
    losses = [lines(Path(f"out/runs/optimizer.lr-1e-4-seed-{seed}"))[-1]["eval/loss"] for seed in (1, 2)]
    _, row = rows(Path("out/comparison.md").read_text())
    assert row[:3] == ["optimizer.lr=1e-4", "2", f"{statistics.mean(losses):.4f} ± {statistics.stdev(losses):.4f}"]


def test_another_setting_adds_rows_and_what_is_finished_is_not_run_again(folder, started):
    assert main(["compare", "job.toml", "--set", "optimizer.lr=1e-4,3e-2", "--out", "out"]) == 0
    assert main(["compare", "job.toml", "--set", "optimizer.lr=1e-4,1e-3", "--out", "out"]) == 0
    assert main(["compare", "job.toml", "--set", "job.seed=7", "--out", "out"]) == 0
    assert [name for name, _ in started] == [*(f"optimizer.lr-{lr}" for lr in ("1e-4", "3e-2", "1e-3")), "job-seed-7"]
    labels = [row[0] for row in rows(Path("out/comparison.md").read_text())[1:]]
    assert sorted(labels) == ["job", *(f"optimizer.lr={lr}" for lr in ("1e-3", "1e-4", "3e-2"))]
    assert main(["compare", "job.toml", "--set", "optimizer.lr=1e-4", "--train.steps=5", "--out", "out"]) == 0
    assert started[-1][0] == "optimizer.lr-1e-4", "a job that has changed goes on"


def test_runs_that_exist_are_compared_by_what_differs_in_their_jobs(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    for name, more in {"a": [], "b": ["--optimizer.lr=0.03", "--train.steps=6"]}.items():
        assert main(["run", "job.toml", f"--job.name={name}", "--loggers.console.style=off", *more]) == 0
    capsys.readouterr()
    assert main(["compare", "runs/a", "runs/b"]) == 0
    seen = capsys.readouterr().out
    assert all(len(line) <= 60 for line in seen.splitlines())
    assert "1. b: train.steps=6, optimizer.lr=0.03" in seen
    assert "2. a: train.steps=4, optimizer.lr=0.01" in seen
    assert "CPU" not in seen, "nothing is known of it"
    assert not Path("comparison.md").exists()
    assert main(["compare", "runs/a", "runs/b", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [row["label"][0] for row in facts["rows"]] == ["b", "a"]
    assert facts["rows"][0]["difference"] == 0
    assert facts["rows"][1]["steps"] == 4
    assert facts["rows"][1]["cpu_seconds"] is None
    assert facts["failed"] == []


def test_runs_under_different_tokenizers_come_with_a_warning(folder, capsys):
    for name, more in {"a": [], "b": ["--data.tokenizer.type=forge-plugin-text/bytes"], "c": ["--job.seed=3"]}.items():
        assert main(["run", "job.toml", f"--job.name={name}", "--loggers.console.style=off", *more]) == 0
    capsys.readouterr()
    assert main(["compare", "runs/a", "runs/b", "--json"]) == 0
    out, err = capsys.readouterr()
    assert len(json.loads(out)["rows"]) == 2
    assert not lacks(err, "warning", "data.tokenizer", "eval/bits_per_byte")
    assert main(["compare", "runs/a", "runs/c"]) == 0
    assert "tokenizer" not in capsys.readouterr().err


class TestHalving:
    def test_the_worse_half_stops_at_each_rung_with_a_checkpoint(self, folder, started, capsys):
        Path("job.toml").write_text(EVALUATED)
        grid = ["compare", "job.toml", "--set", "optimizer.lr=1e-5,3e-2,1e-2,1e-4", "--out", "out"]
        assert main([*grid, "--halving"]) == 0
        name = "optimizer.lr-{}".format
        rates = ("1e-5", "3e-2", "1e-2", "1e-4")
        assert started[:4] == [(name(rate), 2) for rate in rates]
        assert started[4:] == [(name("3e-2"), 4), (name("1e-2"), 4), (name("3e-2"), 0)]
        last = {rate: lines(Path("out/runs") / name(rate))[-1]["step"] for rate in rates}
        assert last == {"1e-5": 2, "3e-2": 8, "1e-2": 4, "1e-4": 2}
        assert Path("out/runs/optimizer.lr-1e-5/checkpoints/step-2/manifest.json").is_file()
        labels = [row[0] for row in rows(Path("out/comparison.md").read_text())[1:]]
        assert labels[0] == "optimizer.lr=3e-2"
        assert not lacks(labels[1], "optimizer.lr=1e-2", "stopped", "step 4")
        again = len(started)
        assert main([*grid, "--halving"]) == 0
        assert len(started) == again, "nothing is left to do"
        assert main(grid) == 0
        assert started[again:] == [(name(rate), 0) for rate in ("1e-5", "1e-2", "1e-4")], "they are taken up again"
        assert "(stopped" not in Path("out/comparison.md").read_text()

    @pytest.mark.parametrize(
        ("count", "steps", "interval", "rungs"),
        [
            (2, 100, 10, [50]),
            (8, 80, 10, [10, 20, 40]),
            (8, 100, 30, [30, 60]),
            (5, 1000, 1, [125, 250, 500]),
            (1, 100, 10, []),
        ],
    )
    def test_rungs_are_evaluations_at_halves_of_the_steps(self, make_job, count, steps, interval, rungs):
        job = make_job(steps=steps, eval={"interval": interval})
        assert rungs_of(count, [job] * count) == rungs
        assert [kept(number) for number in (8, 5, 3, 2, 1)] == [4, 3, 2, 1, 1]

    def test_jobs_that_cannot_be_halved_are_refused(self, make_job):
        assert EvalSection().interval == 0
        with refuses("", "eval.interval"):
            rungs_of(2, [make_job(steps=4)])
        with refuses("", "step 4", "eval.interval"):
            rungs_of(2, [make_job(steps=4, eval={"interval": 4})])
        with refuses("", "train.steps", "eval.interval", "differ"):
            rungs_of(2, [make_job(steps=4, eval={"interval": 1}), make_job(steps=5, eval={"interval": 1})])


class TestSearch:
    SPACE = ["--set", "optimizer.lr=log(1e-4,1e-1)", "--set", "optimizer.weight_decay=0.0,0.1"]

    def test_values_are_chosen_and_a_command_continues(self, folder, started):
        pytest.importorskip("optuna")
        search = ["compare", "job.toml", *self.SPACE, "--search", "optuna", "--out", "out", "--trials"]
        assert main([*search, "2"]) == 0
        assert main([*search, "3"]) == 0
        assert len(started) == 3
        entries = json.loads(Path("out/comparison.json").read_text())["runs"].values()
        rates = [float(entry["settings"]["optimizer.lr"]) for entry in entries]
        assert len(set(rates)) == 3
        assert all(1e-4 <= rate <= 1e-1 for rate in rates)
        assert {entry["settings"]["optimizer.weight_decay"] for entry in entries} <= {"0.0", "0.1"}
        assert len(rows(Path("out/comparison.md").read_text())) == 1 + 3

    def test_results_draw_it_to_the_optimum(self):
        pytest.importorskip("optuna")
        search = Search({"x": Distribution("log", 1e-4, 1.0), "n": Distribution("int", 1, 9)})
        asked = []
        for _ in range(30):
            [values] = search.ask(1)
            asked.append(values)
            search.tell(values, abs(math.log10(float(values["x"])) + 2) + abs(int(values["n"]) - 3))
        near = [v for v in asked[-8:] if 1e-3 < float(v["x"]) < 1e-1 and 1 <= int(v["n"]) <= 5]
        assert len(near) >= 6
        again = Search({"x": Distribution("log", 1e-4, 1.0), "n": Distribution("int", 1, 9)})
        assert again.ask(1) == [asked[0]], "the same results, the same values"

    def test_it_is_refused_by_name_without_optuna(self, folder, monkeypatch, capsys):
        monkeypatch.setitem(sys.modules, "optuna", None)
        assert main(["compare", "job.toml", *self.SPACE, "--search", "optuna", "--trials", "2", "--out", "out"]) == 1
        assert not lacks(capsys.readouterr().err, 'pip install "forge-plugin-runs[optuna]"')
        assert not Path("out").exists()

    @pytest.mark.parametrize(
        ("text", "read"),
        [
            ("a=log(1e-4,1e-2)", Distribution("log", 1e-4, 1e-2)),
            ("a=uniform(0, 1)", Distribution("uniform", 0, 1)),
            ("a=int(2,8)", Distribution("int", 2, 8)),
            ("a=1,2", ["1", "2"]),
        ],
    )
    def test_ranges_and_lists(self, text, read):
        assert read_space([text]) == {"a": read}

    @pytest.mark.parametrize("text", ["a=log(0,1)", "a=uniform(1,1)", "a=int(1)", "a=log(x,y)"])
    def test_ranges_that_are_none_are_refused(self, text):
        with pytest.raises(JobError, match="--set a="):
            read_space([text])


@pytest.mark.parametrize(
    ("argv", "facts"),
    [
        (["job.toml"], ["--out"]),
        (["job.toml", "--set", "optimizer.lr=log(1e-4,1)", "--out=o"], ["distribution", "--search"]),
        (["job.toml", "--search=optuna", "--out=o"], ["--search", "--trials"]),
        (["job.toml", "--search=optuna", "--trials=2", "--out=o"], ["--search", "vary"]),
        (["job.toml", "job.toml", "--search=optuna", "--trials=2", "--out=o"], ["--search", "one job file"]),
        (["job.toml", "--halving", "--search=optuna", "--trials=2", "--set=a=1", "--out=o"], ["--halving", "search"]),
        (["job.toml", "--halving", "--nproc=2", "--out=o"], ["--halving", "one process"]),
        (["job.toml", "--halving", "--set=optimizer.lr=1.0,2.0", "--out=o"], ["eval.interval"]),
        (["job.toml", "--search=optuna", "--trials=2", "--set=job.seed=1,2", "--out=o"], ["luckiest seed"]),
        (["empty"], ["empty", "metrics.jsonl"]),
        (["ran", "--set", "a=1"], ["--set", "run folders"]),
    ],
)
def test_options_that_do_not_go_together_are_refused_before_anything_is_made(folder, capsys, argv, facts):
    (folder / "empty").mkdir()
    (folder / "ran").mkdir()
    (folder / "ran/metrics.jsonl").touch()
    assert main(["compare", *argv]) == ExitCode.BAD_JOB
    assert not lacks(capsys.readouterr().err, *facts)
    assert not Path("o").exists()


class TestBeforeRunsAreStarted:
    GRID = ("compare", "job.toml", "--set=optimizer.lr=1e-4,3e-2", "--out=o")

    @pytest.mark.parametrize(
        ("gpus", "flags", "facts"),
        [
            (3, ["--nproc=2"], ["--parallel 2", "4 GPUs", 3]),
            (4, ["--nproc=2"], []),
            (3, ["--nproc=2", "--train.device=cpu"], []),
            (0, ["--nproc=2"], []),
        ],
    )
    def test_each_rank_needs_a_gpu(self, folder, monkeypatch, capsys, gpus, flags, facts):
        monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
        monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
        monkeypatch.setattr(Processes, "run", lambda *_: False)
        assert main([*self.GRID, "--parallel=2", *flags]) == (ExitCode.BAD_JOB if facts else ExitCode.STOPPED)
        assert not lacks(capsys.readouterr().err, *facts)
        assert Path("o").exists() == (not facts)

    def test_runs_without_a_held_out_loss_are_not_halved(self, folder, monkeypatch, capsys):
        def run(self, trials, stop_at, on_end):
            for trial in trials:
                on_end(Finished(trial=trial, code=0, cpu_seconds=1.5, peak_memory=10_000_000))
            return True

        Path("job.toml").write_text(EVALUATED)
        monkeypatch.setattr(Processes, "run", run)
        assert main([*self.GRID, "--halving"]) == ExitCode.FAILED
        assert not lacks(capsys.readouterr().err, "optimizer.lr-1e-4", "eval/loss", "step 4", "--halving")


@pytest.mark.slow
def test_an_interruption_stops_the_runs_with_checkpoints_and_leaves_a_table(folder):
    Path("job.toml").write_text(EVALUATED.replace("steps = 8", "steps = 100000"))
    command = [
        sys.executable,
        "-m",
        "forge_core",
        "compare",
        "job.toml",
        "--set",
        "optimizer.lr=1e-3,1e-2",
        "--out=out",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        metrics = Path("out/runs/optimizer.lr-1e-3/metrics.jsonl")
        deadline = time.monotonic() + 180
        while not (metrics.is_file() and metrics.read_text().count("\n") > 3):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        seen = process.communicate(timeout=120)[0]
    assert process.returncode == ExitCode.STOPPED, seen
    assert not lacks(seen, "interrupted")
    [row] = rows(Path("out/comparison.md").read_text())[1:]
    assert row[0] == "optimizer.lr=1e-3 (interrupted)"
    assert list(Path("out/runs/optimizer.lr-1e-3/checkpoints").glob("step-*/manifest.json"))


def test_a_further_run_waits_for_memory(folder, monkeypatch):
    alone = Processes(logs=folder, parallel=3, largest=1000)
    running = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)]
    alone._running = [processes._Running(None, running[0], ())]
    try:
        monkeypatch.setattr(processes, "free_memory", lambda: 10**15)
        assert alone._has_room()
        monkeypatch.setattr(processes, "free_memory", lambda: 1100)
        assert not alone._has_room(), "1.2 times the largest must be free"
        alone._running = []
        assert alone._has_room(), "one runs whatever is free"
    finally:
        running[0].communicate()
    assert processes.free_memory() > 0


def test_cores_are_divided_between_runs(folder, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(12))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert Processes(logs=folder, parallel=3, ranks=2)._environment([])["OMP_NUM_THREADS"] == "2"
    assert "OMP_NUM_THREADS" not in Processes(logs=folder)._environment([])
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert Processes(logs=folder, parallel=3)._environment([1, 2])["OMP_NUM_THREADS"] == "5"
    assert Processes(logs=folder, parallel=3)._environment([1, 2])["CUDA_VISIBLE_DEVICES"] == "1,2"


@pytest.mark.parametrize(
    ("settings", "label"),
    [
        ({"optimizer.type": "muon"}, "optimizer.type=muon"),
        ({"optimizer.type": '"muon"', "optimizer.lr": "3e-4"}, "optimizer.type=muon, optimizer.lr=3e-4"),
        ({"optimizer": '{type = "muon", lr = 0.02}'}, "optimizer.type=muon, optimizer.lr=0.02"),
        ({"optimizer.betas": "[0.9, 0.95]"}, "optimizer.betas=[0.9, 0.95]"),
        ({"model": '{ffn = {type = "moe", experts = 4}}'}, "model.ffn.type=moe, model.ffn.experts=4"),
    ],
)
def test_labels_name_keys_as_a_job_has_them(settings, label):
    assert label_of("", settings) == label


def test_a_record_that_is_no_json_is_named(folder):
    Path("out").mkdir()
    Path("out/comparison.json").write_text("{")
    with pytest.raises(ForgeError, match=naming("out/comparison.json")):
        Record(Path("out"))


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
    assert not lacks(seen.err, "1 of 2", "failing", "out/logs")
    assert "the flux is out of bounds" in Path("out/logs/failing.log").read_text()
    assert "| job | " in Path("out/comparison.md").read_text()


def test_nothing_is_started_if_any_job_is_wrong(folder, capsys):
    assert (
        main(["compare", "job.toml", "--set", "optimizer.lr=1e-3,fast", "--set", "train.stps=1", "--out", "out"]) == 2
    )
    seen = capsys.readouterr().err
    assert "optimizer.lr" in seen
    assert not lacks(seen, "train.stps", "'steps'")
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
    assert few[0].name == many[1].name == "optimizer.lr-1"
    assert len({trial.name for trial in trials_of([Path("x/a.toml"), Path("y/a.toml")], [], [], Path("out"))}) == 2


def test_dots_in_the_names_of_runs_are_no_suffix():
    runs = [Path(f"{folder}/v1.{number}") for folder in "ab" for number in (1, 2)]
    assert [trial.name for trial in existing(runs)] == ["a/v1.1", "a/v1.2", "b/v1.1", "b/v1.2"]


def test_losses_that_are_not_finite_come_last(tmp_path):
    trials = trials_of([Path("a.toml")], ["optimizer.lr=1,2,3"], [], Path("out"))
    for trial, loss in zip(trials, ["NaN", "2.0", "1.0"], strict=True):
        (tmp_path / trial.name).mkdir()
        line = f'{{"step": 1, "loss": {loss}, "tokens": 8, "step_seconds": 0.1}}'
        (tmp_path / trial.name / "metrics.jsonl").write_text(line + "\n")
    rows = rows_of([read_outcome(trial, tmp_path / trial.name) for trial in trials])
    assert [row.cell.label for row in rows] == ["optimizer.lr=3", "optimizer.lr=2", "optimizer.lr=1"]


def test_curves_beyond_the_colours_are_dashed(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(picture, "write_figure", lambda figure, path, form: figures.append(figure))
    count = len(picture.COLORS) + 2
    rows = []
    for number in range(count):
        cell = Cell(job=tmp_path / "job.toml", settings={}, label=str(number))
        trial = Trial(cell=cell, seed="", name=str(number), overrides=())
        run = Outcome(
            trial=trial, folder=tmp_path, ended="", step=2, tokens=[8, 16], losses=[3.0, 2.0], evaluations={},
            step_seconds=1.0,
        )  # fmt: skip
        rows.append(CellResult(cell=cell, outcomes=[run], by="mean_loss"))
    picture.draw(rows, tmp_path / "curves.png")
    [figure] = figures
    lines = figure.axes[0].get_lines()
    assert [line.get_linestyle() for line in lines] == ["-"] * len(picture.COLORS) + ["--"] * 2
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == count
