"""`forge-run submit` next to a stand-in for dstack's program."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from dstack_program import DSTACK, JOB, dstack_run

from forge_core.cli import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`forge-run submit job.toml --on dstack.toml …` in a folder with both, and a stand-in for `dstack`."""
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "dstack"
    program.write_text(DSTACK)
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    (tmp_path / "runs.json").write_text(json.dumps({"runs": []}))
    (tmp_path / "after.json").write_text(json.dumps({"runs": [dstack_run("submitted", identity="2")]}))

    def run(*words: str) -> tuple[int, str, str]:
        code = main(["submit", "job.toml", "--on=dstack.toml", *words])
        return (code, *capsys.readouterr())

    return run
