"""What `forge-run` prints of a run: quiet, usual, verbose, and the live line of narrow terminals."""

from __future__ import annotations

import io
import tomllib
from pathlib import Path

import pytest
from rich.console import Console as Terminal

from forge_core.cli import main
from forge_core.launch.rank_process import this_process
from forge_core.metrics.console import LiveLogger
from forge_testing.refusals import lacks
from forge_testing.tiny import TINY_JOB

JOB = TINY_JOB.replace("steps = 4", "steps = 100")
RECORD = {"step": 4321, "loss": 3.25, "grad_norm": 1.5, "lr": 3e-4, "tokens_per_second": 12345.0}


@pytest.fixture
def printed(tmp_path, monkeypatch, capsys):
    """Output and errors of a run with these options."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(JOB)

    def run(name: str, *options: str) -> tuple[str, str]:
        assert main(["job.toml", f"--job.name={name}", *options]) == 0
        return capsys.readouterr()

    yield run
    this_process.verbosity = 0


def test_a_quiet_run_prints_its_end_only(printed) -> None:
    out, err = printed("quiet", "--quiet")
    finished, folder = out.splitlines()
    assert not lacks(finished, "step 100", "loss")
    assert (folder, err) == ("runs/quiet", "")


def test_a_verbose_run_prints_the_resolved_job_and_every_step(printed) -> None:
    out, _ = printed("v", "-v")
    job, _, rest = out.partition("\n\nrun      ")
    assert tomllib.loads(job)["train"]["steps"] == 100
    assert tomllib.loads(job) == tomllib.loads(Path("runs/v/job.toml").read_text())
    assert all(f"step {step}/100  loss" in rest for step in range(1, 101))


def test_verbosity_is_no_part_of_the_job(printed) -> None:
    printed("q", "-q")
    printed("v", "-v")
    jobs = [tomllib.loads(Path(f"runs/{name}/job.toml").read_text()) for name in "qv"]
    assert jobs[0]["loggers"] == jobs[1]["loggers"]
    out, _ = printed("usual")
    assert "step 2/100" in out
    assert "step 3/100" not in out


def test_the_two_contradict_each_other(printed, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["job.toml", "-q", "-v"])
    assert not lacks(capsys.readouterr().err, "-q/--quiet", "-v/--verbose")


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (60, "left  loss 3.2500  grad norm 1.5"),
        (80, "left  loss 3.2500  grad norm 1.5  lr 0.0003"),
        (130, "left  loss 3.2500  grad norm 1.5  lr 0.0003  12,345 tokens/s"),
    ],
)
def test_a_narrow_terminal_keeps_step_and_loss_and_drops_metrics_from_the_right(width, shown) -> None:
    terminal = Terminal(file=io.StringIO(), width=width, force_terminal=True, no_color=True, color_system=None)
    logger = LiveLogger(terminal, 5000)
    logger.start(4320)
    logger.log(RECORD)
    logger.close()
    line = terminal.file.getvalue().rpartition("\x1b[2K")[2].partition("\n")[0]
    assert line.startswith("4321/5000 ")
    assert line.endswith(shown)
    assert len(line) <= width


def test_no_color_is_respected(monkeypatch) -> None:
    def shown() -> str:
        terminal = Terminal(file=io.StringIO(), force_terminal=True, width=100)
        logger = LiveLogger(terminal, 10)
        logger.start(0)
        logger.log({"step": 1, "eval/loss": 2.0})
        logger.close()
        return terminal.file.getvalue()

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[36m" in shown()  # cyan
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[36m" not in shown()
