"""`forge-run submit` next to a stand-in for SkyPilot's program."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from sky_program import JOB, SKY, managed_job

from forge_core.cli import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`forge-run submit job.toml --on sky.toml …` in a folder with both, and a stand-in for `sky`."""
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "sky"
    program.write_text(SKY)
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    (tmp_path / "queue.json").write_text("[]")
    (tmp_path / "after.json").write_text(json.dumps([managed_job(7, "PENDING")]))

    def run(*words: str) -> tuple[int, str, str]:
        layers = [word for word in words if not word.startswith("-")]
        code = main(["submit", "job.toml", *layers, "--on=sky.toml", *(word for word in words if word not in layers)])
        return (code, *capsys.readouterr())

    return run
