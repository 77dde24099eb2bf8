"""`forge-run runs`, `show` and `resume`: what a run folder says, and how a run is continued from it alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from forge_core import read_metrics
from forge_core.checkpoint.run_folder import RunFolder, owned
from forge_core.cli import main
from forge_core.contracts.errors import ExitCode, JobError
from forge_core.contracts.run_end import Cause, End
from forge_plugin_runs.facts import demand_run, find_runs, last_records, read_run
from forge_plugin_runs.words import age_text, count_text, fitted, size_text
from forge_testing.refusals import lacks
from forge_testing.tiny import TINY_JOB

Forge = Callable[..., tuple[int, str, str]]
EVALUATED = "[eval]\ninterval = 2\n[checkpoint]\ninterval = 2\n"
DIES = """
import os
from attrs import define
from forge_core import TrainingHook


@define(kw_only=True, slots=False)
class Dies(TrainingHook):
    def on_step_end(self, context):
        if context.step == 3:
            os.kill(os.getpid(), 9)
"""

ENOUGH = """
from attrs import define
from forge_core import TrainingHook


@define(kw_only=True, slots=False)
class Enough(TrainingHook):
    at: int = 2

    def on_step_end(self, context):
        if context.step == self.at:
            context.request_stop("no need for more", final=True)
"""


@pytest.fixture
def forge(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Forge:
    """Run a command line in this process, in a folder of its own: exit code, output, errors."""
    monkeypatch.chdir(tmp_path)

    def run(*argv: str) -> tuple[int, str, str]:
        try:
            code = main(list(argv))
        except SystemExit as end:
            code = int(end.code or 0)
        return (code, *capfd.readouterr())

    return run


@pytest.fixture
def trained(forge: Forge, tmp_path: Path) -> Path:
    """A finished run that was started from two layered files."""
    (tmp_path / "job.toml").write_text(TINY_JOB + EVALUATED)
    (tmp_path / "layer.toml").write_text('[job]\nname = "tiny"\n[train]\nsteps = 6\n')
    assert forge("job.toml", "layer.toml", "--train.steps=4")[0] == 0
    return tmp_path / "runs/tiny"


def rows(out: str) -> list[list[str]]:
    return [line.split("  ") for line in out.splitlines()]


class TestRuns:
    def test_a_finished_run_is_listed_with_its_figures(self, forge: Forge, trained: Path) -> None:
        code, out, err = forge("runs")
        assert (code, err) == (0, "")
        head, line = out.splitlines()
        assert head.split() == ["RUN", "STATE", "STEP", "LOSS", "HELD", "OUT", "TOKENS", "UPDATED", "SIZE"]
        trained_record, _ = last_records(trained / "metrics.jsonl")
        assert line.split()[:6] == ["runs/tiny", "finished", "4", "of", "4", f"{trained_record['loss']:.4f}"]
        assert " ago " in line

    def test_json_has_the_facts_of_each(self, forge: Forge, trained: Path) -> None:
        [facts] = json.loads(forge("runs", "--json")[1])
        lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
        assert facts["run"] == "runs/tiny"
        assert (facts["state"], facts["step"], facts["steps"], facts["tokens"]) == ("finished", 4, 4, 4 * 4 * 8)
        assert facts["loss"] == [line for line in lines if "loss" in line][-1]["loss"]
        assert facts["checkpoints"] == [2, 4]
        assert facts["size"] == sum(path.stat().st_size for path in trained.rglob("*") if path.is_file())

    def test_a_run_that_has_its_folder_is_running(self, forge: Forge, trained: Path) -> None:
        with owned(trained):
            [facts] = json.loads(forge("runs", "--json")[1])
            _, out, _ = forge("runs")
        assert facts["state"] == "running"
        assert facts["owner"].startswith(f"process {os.getpid()} on ")
        assert f"runs/tiny: {facts['owner']}" in out.splitlines()

    def test_a_run_that_ended_by_request_is_stopped(self, forge: Forge, trained: Path) -> None:
        job = trained / "job.toml"
        job.write_text(job.read_text().replace("steps = 4", "steps = 40"))
        RunFolder(trained).remove_end()
        assert read_run(trained).state == "stopped", "of a run from before there were records"

    @pytest.mark.parametrize(
        ("end", "state"),
        [
            (End(code=75, cause=Cause.SIGNAL, signal="SIGINT", reason="stopped by SIGINT before training"), "stopped"),
            (End(code=75, cause=Cause.REQUEST, reason="a fault: row remap pending", step=2), "stopped"),
            (End(code=1, cause=Cause.FAILED, reason="ValueError: out of bounds", step=3, rank=5, host="gpu7"), "died"),
            (End(code=0, cause=Cause.REQUEST, final=True, reason="no need for more", step=3), "finished"),
        ],
    )
    def test_the_end_of_a_run_is_shown_with_its_whole_reason(
        self, forge: Forge, trained: Path, end: End, state: str
    ) -> None:
        RunFolder(trained).write_end(end, supersede=True)
        [facts] = json.loads(forge("runs", "--json")[1])
        assert facts["state"] == state
        assert facts["end"]["reason"] == end.reason
        assert end.reason in forge("runs")[1]
        shown = forge("show", "runs/tiny")[1]
        assert end.reason in shown
        assert ("rank 5 on gpu7" in shown) == (end.rank == 5)
        assert end.reason in forge("watch", "runs/tiny", "--once")[1]

    def test_metrics_are_read_where_the_logger_writes_them(self, forge: Forge, trained: Path) -> None:
        assert forge("job.toml", "--job.name=else", "--loggers.jsonl.file=lines.jsonl")[0] == 0
        [other] = json.loads(forge("runs", "--name", "else", "--json")[1])
        assert other["loss"] is not None
        assert json.loads(forge("show", "runs/else", "--json")[1])["metrics"]["step"] == 4
        assert [row["step"] for row in read_metrics("runs/else")] == [1, 2, 3, 4]

    def test_the_last_evaluation_is_looked_for_in_a_bounded_part_of_the_metrics(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "metrics.jsonl"
        first = '{"step": 0, "eval/loss": 1.0}\n'
        path.write_text(first + "".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in range(100)))
        assert last_records(path)[1]["eval/loss"] == 1.0
        monkeypatch.setattr("forge_plugin_runs.facts.LOOK", 1000)
        assert last_records(path) == ({"step": 99, "loss": 1.0}, {})

    def test_a_run_that_a_hook_has_ended_for_good_is_finished(
        self, forge: Forge, trained: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "enough.py").write_text(ENOUGH)
        command = ["job.toml", "--job.name=enough", "--hooks.enough.type=./enough.py:Enough"]
        assert forge(*command)[0] == 0
        code, out, _ = forge(*command)
        assert code == 0
        assert not lacks(out, "step 2", "no need for more")
        run = read_run(tmp_path / "runs/enough")
        assert (run.state, run.step, run.ended) == ("finished", 2, "no need for more")
        _, shown, _ = forge("show", "runs/enough")
        assert not lacks(shown, "code 0", "step 2", "no need for more")
        assert not lacks(shown, "forge-run resume runs/enough --resume-with-changes")
        assert forge("resume", "runs/enough", "--resume-with-changes", "--hooks.enough.at=9")[0] == 0
        assert read_run(tmp_path / "runs/enough").ended == ""

    def test_a_killed_run_has_died_at_its_last_step_and_continues_from_its_checkpoint(
        self, forge: Forge, tmp_path: Path
    ) -> None:
        (tmp_path / "dies.py").write_text(DIES)
        (tmp_path / "job.toml").write_text(TINY_JOB + EVALUATED)
        command = [sys.executable, "-m", "forge_core", "job.toml", "--hooks.it.type=./dies.py:Dies"]
        assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == -signal.SIGKILL
        run = read_run(Path("runs/run"))
        assert (run.state, run.checkpoints) == ("died", [2])
        assert run.owner.startswith("process ")
        (tmp_path / "dies.py").write_text(DIES.replace("== 3", "== 99"))
        code, out, _ = forge("resume", "runs/run")
        assert code == 0
        assert not lacks(out, "step 4")
        assert read_run(Path("runs/run")).state == "finished"

    def test_a_run_is_listed_before_it_has_its_job(self, forge: Forge, tmp_path: Path) -> None:
        with owned(tmp_path / "runs/new"):
            [facts] = json.loads(forge("runs", "--json")[1])
        assert (facts["state"], facts["step"], facts["steps"], facts["loss"]) == ("running", 0, None, None)

    def test_they_are_found_below_folders_sorted_and_filtered(self, forge: Forge, trained: Path) -> None:
        shutil.copytree(trained, "runs/sweep/other")
        job = Path("runs/sweep/other/job.toml")
        RunFolder(job.parent).remove_end()
        job.write_text(job.read_text().replace("steps = 4", "steps = 40"))

        def names(*options: str) -> list[str]:
            return [facts["run"] for facts in json.loads(forge("runs", "--json", *options)[1])]

        assert names("--sort", "name") == ["runs/sweep/other", "runs/tiny"]
        assert names("--state", "stopped") == ["runs/sweep/other"]
        assert names("--name", "t*") == ["runs/tiny"]
        assert names("--sort", "name", "--limit", "1") == ["runs/sweep/other"]
        assert names("runs/sweep") == ["runs/sweep/other"]

    def test_the_newest_largest_or_best_is_first(self, forge: Forge, trained: Path) -> None:
        other = Path("runs/z")
        shutil.copytree(trained, other)
        with (other / "metrics.jsonl").open("a") as metrics:
            metrics.write('{"step": 6, "loss": 0.5}\n{"step": 6, "eval/loss": 0.25, "eval/perplexity": 1.28}\n')

        def first(*options: str) -> str:
            listed = json.loads(forge("runs", "--json", *options)[1])
            assert len(listed) == 2
            return listed[0]["run"]

        for fact in ("step", "loss", "held-out", "size"):
            assert first("--sort", fact) == "runs/z", fact
        # The newest of a run's files counts: while it runs, only its metrics change
        for folder, time in ((trained, 1e9), (other, 1e9 + 60)):
            for path in (folder, *folder.rglob("*")):
                os.utime(path, (time, time))
        os.utime(trained / "metrics.jsonl", (1e9 + 120, 1e9 + 120))
        assert first() == first("--sort", "updated") == "runs/tiny"

    @pytest.mark.parametrize("name", ["a", "z"])
    def test_a_run_whose_loss_is_no_number_is_last(self, forge: Forge, trained: Path, name: str) -> None:
        shutil.copytree(trained, f"runs/{name}")
        with Path(f"runs/{name}/metrics.jsonl").open("a") as metrics:
            metrics.write('{"step": 6, "loss": NaN}\n')
        listed = json.loads(forge("runs", "--json", "--sort", "loss")[1])
        assert [each["run"] for each in listed] == ["runs/tiny", f"runs/{name}"]

    def test_without_runs_that_is_said_and_a_missing_folder_is_an_error(self, forge: Forge) -> None:
        code, out, err = forge("runs")
        assert (code, out.count("\n"), lacks(out, "runs"), err) == (0, 1, [], "")
        assert forge("runs", "--json")[1] == "[]\n"
        code, out, err = forge("runs", "gone")
        assert (code, out, lacks(err, "gone")) == (ExitCode.BAD_JOB, "", [])

    def test_eight_runs_nearby_are_named_in_place_of_a_folder_that_is_none(self, trained: Path) -> None:
        for number in range(8):
            shutil.copytree(trained, trained.with_name(f"run-{number}"))
        for asked in ("runs", "runs/gone"):
            with pytest.raises(JobError) as caught:
                demand_run(Path(asked))
            assert len(re.findall(r"runs/(tiny|run-\d)", str(caught.value))) == 8

    def test_what_cannot_be_read_is_named_and_the_rest_is_shown(self, forge: Forge, trained: Path) -> None:
        (trained / "job.toml").write_text("[train")
        code, out, err = forge("runs")
        assert code == 0
        assert "runs/tiny" in out
        assert not lacks(err, "runs/tiny/job.toml")


class TestShow:
    def test_it_has_the_jobs_changes_versions_checkpoints_files_and_the_next_command(
        self, forge: Forge, trained: Path
    ) -> None:
        facts = json.loads(forge("show", "runs/tiny", "--json")[1])
        # Components by path may be anyone's, are not imported, and so have all their keys listed
        by_path = ("model.", "data.", "optimizer.")
        assert {key: value for key, value in facts["job"].items() if not key.startswith(by_path)} == {
            "job.name": "tiny",
            "train.steps": 4,
            "train.global_batch_size": 4,
            "train.seq_len": 8,
            "checkpoint.interval": 2,
            "eval.interval": 2,
        }
        assert facts["job"]["model.dim"] == 16
        assert facts["components"]["model"] == "forge_testing.tiny:TinyModel"
        assert facts["versions"].keys() >= {"forge-run", "torch", "python"}
        assert [checkpoint["step"] for checkpoint in facts["checkpoints"]] == [2, 4]
        assert {"job.toml", "metrics.jsonl", "checkpoints/"} <= facts["files"].keys()
        assert facts["started_in"] == os.getcwd()
        assert facts["next"] == "forge-run resume runs/tiny --train.steps=8"
        text = forge("show", "runs/tiny")[1]
        for expected in ("finished at step 4 of 4", "model.type", "train.steps", "step 2 ", facts["next"]):
            assert expected in text
        assert re.search(r"^  time +\d{4}-\d\d-\d\d \d\d:\d\d:\d\d$", text, re.MULTILINE)
        assert re.search(r"^  step_seconds +[\d.e-]+ s$", text, re.MULTILINE)

    def test_a_checkpoint_has_the_evaluation_of_its_own_step(self, forge: Forge, trained: Path) -> None:
        keys = {"job.name": "more", "train.steps": 3, "checkpoint.interval": 1, "eval.interval": 2}
        assert forge("job.toml", *(f"--{key}={value}" for key, value in keys.items()))[0] == 0
        checkpoints = json.loads(forge("show", "runs/more", "--json")[1])["checkpoints"]
        evaluated = {each["step"]: "eval/loss" in each["evaluation"] for each in checkpoints}
        assert evaluated == {1: False, 2: True, 3: True}  # the last step is always evaluated

    def test_a_folder_that_is_no_run_is_refused_with_the_runs_in_it(self, forge: Forge, trained: Path) -> None:
        code, _, err = forge("show", "runs")
        assert (code, lacks(err, "runs", "job.toml", "runs/tiny")) == (ExitCode.BAD_JOB, [])
        code, _, err = forge("show", "runs/tyni")
        assert (code, lacks(err, "runs/tyni", "runs/tiny")) == (ExitCode.BAD_JOB, [])


class TestResume:
    def test_nothing_is_left_of_a_finished_run(self, forge: Forge, trained: Path) -> None:
        before = (trained / "metrics.jsonl").read_text()
        code, out, err = forge("resume", "runs/tiny")
        assert (code, lacks(out, "train.steps is 4", "--train.steps=8"), err) == (0, [], "")
        assert (trained / "metrics.jsonl").read_text() == before

    def test_more_steps_are_those_of_a_run_that_was_never_stopped(
        self, forge: Forge, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert forge("job.toml", "layer.toml", "--job.name=whole")[0] == 0
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        code, out, _ = forge("resume", "../runs/tiny", "--train.steps=6", "--quiet")
        assert code == 0
        assert not lacks(out, "step 6")
        resumed, whole = (last_records(tmp_path / f"runs/{name}/metrics.jsonl") for name in ("tiny", "whole"))
        assert resumed[0]["loss"] == whole[0]["loss"]
        assert resumed[0]["step"] == 6
        assert not (tmp_path / "elsewhere/runs").exists()

    def test_a_project_that_was_renamed_is_found_by_the_runs_place_in_it(
        self, forge: Forge, trained: Path, tmp_path: Path
    ) -> None:
        moved = tmp_path.with_name(f"{tmp_path.name}-moved")
        os.chdir("/")
        tmp_path.rename(moved)
        try:
            assert forge("resume", str(moved / "runs/tiny"), "--train.steps=5")[0] == 0
            assert read_run(moved / "runs/tiny").step == 5
        finally:
            os.chdir("/")
            moved.rename(tmp_path)

    def test_a_run_that_was_moved_out_asks_where_its_paths_start(
        self, forge: Forge, trained: Path, tmp_path: Path
    ) -> None:
        shutil.move(trained, tmp_path / "kept")
        code, _, err = forge("resume", "kept", "--train.steps=5")
        assert code == ExitCode.BAD_JOB
        assert not lacks(err, f"{tmp_path}/runs/tiny", "--from DIR")
        assert forge("resume", "kept", "--from", ".", "--train.steps=5")[0] == 0
        assert read_run(tmp_path / "kept").step == 5
        assert not trained.exists()

    def test_a_running_one_and_wrong_arguments_are_refused(self, forge: Forge, trained: Path) -> None:
        with owned(trained):
            code, _, err = forge("resume", "runs/tiny")
        assert code == ExitCode.FAILED
        assert not lacks(err, "runs/tiny", f"process {os.getpid()}")
        code, _, err = forge("resume", "runs/tiny", "--train.stepz=5")
        assert code == ExitCode.BAD_JOB
        assert not lacks(err, "train.stepz", "'steps'")
        assert forge("resume", "runs/tiny", "--nproc", "0")[0] == ExitCode.BAD_JOB
        code, _, err = forge("resume", "runs/tiny", "--from", "nowhere")
        assert code == ExitCode.BAD_JOB
        assert not lacks(err, "--from nowhere")
        (trained / "job.toml").unlink()  # as of a start that ended before it was written: the lock is there
        code, _, err = forge("resume", "runs/tiny")
        assert code == ExitCode.BAD_JOB
        assert not lacks(err, "runs/tiny has no job.toml")

    @pytest.mark.slow
    def test_it_continues_on_several_ranks(self, trained: Path) -> None:
        command = [sys.executable, "-m", "forge_core", "resume", "runs/tiny", "--train.steps=6", "--nproc=2"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert not lacks(done.stdout, "step 6")


class TestWords:
    def test_units(self) -> None:
        assert [size_text(n) for n in (0, 1500, 2 * 10**9)] == ["0 B", "1.5 kB", "2.0 GB"]
        assert [count_text(n) for n in (None, 999, 1500, 3 * 10**12)] == ["", "999", "1.5 k", "3.0 T"]
        assert [age_text(n) for n in (-1, 59, 60, 7200, 10**6)] == ["0 s", "59 s", "1 min", "2 h", "11 d"]

    def test_a_narrow_terminal_leaves_columns_out_in_order(self) -> None:
        table = [["NAME", "LOSS", "SIZE"], ["a", "1.0", "9 B"]]
        assert fitted(table, [2, 1], 80) == ["NAME  LOSS  SIZE", "a     1.0   9 B"]
        assert fitted(table, [2, 1], 12) == ["NAME  LOSS", "a     1.0"]
        assert fitted(table, [2, 1], 3) == ["NAME", "a"]

    def test_the_last_lines_are_found_from_the_end_of_a_long_file(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        steps = [json.dumps({"step": n, "loss": 1.0 / n, "padding": "x" * 1000}) for n in range(1, 1001)]
        lines = [*steps[:10], json.dumps({"step": 10, "eval/loss": 2.0}), *steps[10:], '{"step": 1001, "lo']
        path.write_text("\n".join(lines))
        trained, evaluated = last_records(path)
        assert (trained["step"], evaluated) == (1000, {"step": 10, "eval/loss": 2.0})
        assert last_records(tmp_path / "none") == ({}, {})

    def test_run_folders_are_not_searched_for_others(self, tmp_path: Path) -> None:
        for name in ("a", "a/inner", "b/c"):
            (tmp_path / name).mkdir(parents=True)
            (tmp_path / name / ".lock").touch()
        assert [str(path.relative_to(tmp_path)) for path in find_runs(tmp_path)] == ["a", "b/c"]
