"""Ranks that fail are started again, and the run has the losses of one that nobody disturbed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forge_core.cli import main
from forge_core.contracts.errors import ExitCode
from forge_core.contracts.run_end import Cause, End
from forge_kit.tools.supervisor import Supervisor
from forge_plugin_launch.elastic import StartResult, command, run_elastic
from forge_plugin_launch.spares import Spares
from forge_testing import TINY_JOB
from forge_testing.processes import HANG_S
from forge_testing.refusals import lacks

JOB = f"""
[job]
name = "tiny"
{TINY_JOB.replace("steps = 4", "steps = 12")}
[checkpoint]
interval = 2
[hooks.trouble]
type = "./trouble.py:Trouble"
"""

TROUBLE = '''
import os
import signal
import sys
from pathlib import Path

from attrs import define
from forge_core import TrainingHook


@define(kw_only=True, slots=False)
class Trouble(TrainingHook):
    """Goes wrong on the last rank: at the given steps, once each, or at one step every time."""

    resumes_as = "safe"
    killed: tuple[int, ...] = ()
    always: int = 0
    starting: bool = False

    def on_train_begin(self, context):
        size, rank = os.environ.get("WORLD_SIZE", "1"), os.environ.get("RANK", "0")
        with open("starts", "a") as file:
            print(f"{rank}/{size} {sys.modules['__main__'].__spec__.name}", file=file)
        if self.starting and Path("once").exists() and rank == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_begin(self, context):
        if os.environ.get("RANK", "0") != "1":
            return
        if context.step == self.always:
            raise ValueError(f"sample {context.step} is poisoned, says process {os.getpid()}")
        if context.step in self.killed and not Path(f"done-{context.step}").exists():
            Path(f"done-{context.step}").touch()
            Path("once").touch()
            os.kill(os.getpid(), signal.SIGKILL)
'''


@pytest.fixture
def elastic(tmp_path):
    """Runs `forge-run launch elastic` in a folder: returns exit code and standard error."""
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "trouble.py").write_text(TROUBLE)

    def run(*arguments, command="launch elastic"):
        line = [sys.executable, "-m", "forge_core", *command.split(), "job.toml", "-q", *arguments]
        done = subprocess.run(
            line, cwd=tmp_path, capture_output=True, text=True, timeout=600, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        return done.returncode, done.stderr

    run.folder = tmp_path
    return run


def losses(folder):
    from forge_kit.tools.metrics import read_metrics

    return {row["step"]: row["loss"] for row in read_metrics(folder)}


@pytest.mark.slow
def test_a_run_whose_rank_was_killed_has_the_losses_of_one_that_was_not(elastic):
    code, err = elastic("--nproc", "2", "--hooks.trouble.killed=[4]")
    assert code == 0, err
    assert not lacks(err, "rank 1", "SIGKILL", "restart 1 of 3", "2 ranks", "step 3")
    assert elastic("--nproc", "2", "--job.name=calm", command="run")[0] == 0
    assert losses(elastic.folder / "runs/tiny") == losses(elastic.folder / "runs/calm")


@pytest.mark.slow
def test_an_error_that_comes_again_at_the_same_step_is_the_jobs(elastic):
    code, err = elastic("--nproc", "2", "--max-restarts", "5", "--hooks.trouble.always=7")
    assert code == 1
    assert err.count("sample 7 is poisoned") == 2
    assert not lacks(err.splitlines()[-1], "the same error", "step 6")


@pytest.mark.slow
@pytest.mark.thorough
def test_ranks_that_cannot_be_started_are_left_out(elastic):
    keys = ("--hooks.trouble.killed=[5]", "--hooks.trouble.starting=true")
    code, err = elastic("--nproc", "2", "--min-nproc", "1", *keys)
    assert code == 0, err
    restarts = [line for line in err.splitlines() if line.startswith("forge-run: restart")]
    assert not lacks(restarts[0], "1 of 3", "2 ranks", "step 4")
    assert not lacks(restarts[1], "2 of 3", "1 rank", "step 4")
    elastic("--nproc", "2", "--job.name=calm", command="run")
    calm = losses(elastic.folder / "runs/calm")
    assert losses(elastic.folder / "runs/tiny") == pytest.approx(calm, rel=1e-5)


def test_more_at_the_least_than_at_all_is_refused(elastic):
    code, err = elastic("--nproc", "2", "--min-nproc", "3")
    assert code == 2
    assert not lacks(err, "--min-nproc 3", "--nproc 2")


def test_restarts_are_a_number_from_0(capsys):
    with pytest.raises(SystemExit) as end:
        main(["launch", "elastic", "job.toml", "--nproc=2", "--max-restarts=-1"])
    assert end.value.code == ExitCode.BAD_JOB
    assert not lacks(capsys.readouterr().err, "--max-restarts", -1)


class Scripted:
    """Starts that end as a script says; keeps on how many ranks each was."""

    def __init__(self, *attempts):
        self.attempts, self.ranks = list(attempts), []

    def start(self, ranks):
        self.ranks.append(ranks)
        return self.attempts.pop(0)


def failed(step, began=0, reason="rank 1 failed: ValueError: no", cause=Cause.FAILED):
    end = End(code=1, cause=cause, reason=reason)
    return StartResult(code=1, message=f"forge-run: {reason}", end=end, began=began, step=step)


def lost(step, began):
    return failed(step, began, "rank 1 has gone", Cause.KILLED)


@pytest.mark.parametrize(
    ("attempts", "code", "ranks"),
    [
        ([StartResult(code=0)], 0, [4]),
        ([failed(5), failed(7, 4), failed(9, 6), failed(11, 8)], 1, [4, 4, 4, 4]),
        ([failed(5), failed(5, 4)], 1, [4, 4]),
        ([failed(5), failed(5, 4, "rank 2 failed: OSError"), StartResult(code=0)], 0, [4, 4, 4]),
        ([failed(5), StartResult(code=ExitCode.BAD_JOB)], 2, [4, 4]),
        ([failed(5), StartResult(code=ExitCode.STOPPED)], 75, [4, 4]),
        ([lost(5, 0), lost(4, 4), lost(4, 4)], 1, [4, 4, 2]),
        ([lost(0, 0), lost(0, 0), StartResult(code=0)], 0, [4, 4, 2]),
        ([failed(0), failed(0)], 1, [4, 4]),
        ([failed(5), lost(5, 4), StartResult(code=0)], 0, [4, 4, 4]),
    ],
)
def test_when_ranks_are_started_again_and_how_many(attempts, code, ranks, capsys):
    run = Scripted(*attempts)
    assert run_elastic(run, 4, 2, 3, lambda ranks: ranks != 3) == code
    assert run.ranks == ranks
    assert not run.attempts


@pytest.mark.slow
def test_a_spare_process_takes_its_command_before_it_is_ready(tmp_path):
    spares = Spares(1, after_s=600)
    spares._refill()
    [(spare, _)] = spares._waiting
    command = [sys.executable, "-m", "forge_core", "run", str(tmp_path / "no.toml")]
    process = spares(command, env={**os.environ}, pass_fds=[])
    spares.close()
    assert process is spare
    assert process.wait(HANG_S) == ExitCode.BAD_JOB


@pytest.mark.slow
def test_a_spare_process_becomes_a_rank(elastic, monkeypatch):
    monkeypatch.chdir(elastic.folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    spares = Spares(2, after_s=0)
    spares._refill()
    until = time.monotonic() + HANG_S
    while spares.ready() < 2 and time.monotonic() < until:
        time.sleep(0.05)
    command = [sys.executable, "-m", "forge_core", "run", "job.toml", "-q", "--nproc=1"]
    ended = Supervisor(command, 2, Path("runs/tiny/logs"), 10.0, popen=spares).run()
    spares.close()
    assert ended.code == 0, ended
    starts = sorted((elastic.folder / "starts").read_text().splitlines())
    assert starts == ["0/2 forge_plugin_launch.spares", "1/2 forge_plugin_launch.spares"]
    assert losses(elastic.folder / "runs/tiny")[12]


def test_without_a_spare_process_a_rank_is_started_as_ever():
    spares = Spares(2, after_s=1000)
    process = spares([sys.executable, "-c", "raise SystemExit(3)"], env=dict(os.environ), pass_fds=[])
    assert process.wait() == 3
    spares.close()


@pytest.mark.parametrize("asked", [[], ["--resume-with-changes"], ["--quiet"]])
def test_ranks_are_started_with_no_more_than_was_asked_for(asked, tmp_path, monkeypatch):
    (tmp_path / "job.toml").write_text(TINY_JOB)
    started = []
    monkeypatch.setattr("forge_plugin_launch.elastic.run_elastic", lambda run, *_: started.append(run.arguments) or 0)
    job = str(tmp_path / "job.toml")
    assert command([job, "--nproc=2", *asked]) == 0
    assert started == [[job, *asked]]
