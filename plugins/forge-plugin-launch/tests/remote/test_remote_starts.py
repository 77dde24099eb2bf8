"""Whether a cluster that goes by no exit code should start a run again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from forge_core.cli import main
from forge_core.contracts.errors import ExitCode
from forge_plugin_launch.remote.starts import GIVE_UP, decide
from forge_testing.tiny import TINY_JOB


def end(folder: Path, code: int, attempt: str = "a") -> None:
    table = {"code": code, "cause": "failed", "reason": "it was so", "attempt": attempt}
    folder.mkdir(exist_ok=True)
    (folder / "end.json").write_text(json.dumps(table))


def checkpoint(folder: Path, step: int) -> None:
    (folder / "checkpoints" / f"step-{step}").mkdir(parents=True)


def test_a_run_that_has_ended_for_good_is_not_started_again(tmp_path: Path) -> None:
    assert decide(tmp_path / "run", "a", 3) == ""
    for code in (ExitCode.BAD_JOB, ExitCode.NON_FINITE):
        end(tmp_path / "run", code)
        assert f"exit code {code}, it was so" in decide(tmp_path / "run", "a", 3)
        assert decide(tmp_path / "run", "b", 3) == "", "of another submission"


def test_starts_are_bounded_while_no_checkpoint_is_made(tmp_path: Path) -> None:
    assert [bool(decide(tmp_path, "a", 2)) for _ in range(4)] == [False, False, False, True]
    checkpoint(tmp_path, 10)
    end(tmp_path, ExitCode.FAILED)
    assert [bool(decide(tmp_path, "a", 2)) for _ in range(3)] == [False, False, False]
    checkpoint(tmp_path, 9)
    assert "3 starts in a row made no checkpoint after step 10; the last end: it was so" in decide(tmp_path, "a", 2)
    assert decide(tmp_path, "b", 2) == "", "the user has submitted it again"


def test_a_run_that_saved_is_started_again_however_often(tmp_path: Path) -> None:
    end(tmp_path, ExitCode.STOPPED)
    assert {decide(tmp_path, "a", 0) for _ in range(3)} == {""}


def test_records_that_cannot_be_read_count_as_none(tmp_path: Path) -> None:
    (tmp_path / "end.json").write_text("{")
    (tmp_path / "starts.json").write_text('{"of": "a later version"}')
    assert decide(tmp_path, "a", 0) == ""


def test_the_record_of_a_real_run_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORGE_ATTEMPT", "7")
    Path("job.toml").write_text(TINY_JOB)
    assert main(["job.toml", "--train.steps=2", "--optimizer.lr=1e30", "--train.non_finite=stop"]) == 76
    program = [sys.executable, "-m", "forge_plugin_launch.remote.starts", "runs/run", "--attempt"]
    ends = [subprocess.run([*program, name], capture_output=True, text=True, check=False) for name in ("7", "8")]
    assert [done.returncode for done in ends] == [GIVE_UP, 0]
    assert "runs/run is not started again: it has ended for good: exit code 76" in ends[0].stderr


def test_a_run_that_has_finished_ends_at_once_when_it_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after another node has failed, which is no reason to call the run failed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORGE_ATTEMPT", "7")
    Path("job.toml").write_text(TINY_JOB)
    # The first start finds what `decide` has written, and nothing else
    assert [(decide(Path("runs/run"), "7", 0), main(["job.toml", "--train.steps=2"])) for _ in range(2)] == [
        ("", 0)
    ] * 2
