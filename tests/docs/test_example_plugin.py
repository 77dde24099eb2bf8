"""The example of "Writing a plugin" installs, is found, trains, and passes the tests it brings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fences import EXAMPLE

from forge_testing.processes import HANG_S

pytestmark = pytest.mark.slow

FORGE_RUN = [sys.executable, "-m", "forge_core"]


@pytest.fixture
def run(installed_example: Path, tmp_path: Path):
    """Run a Python command line in an empty folder, with the example installed or not."""

    def run(*command: str, installed: bool = True) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": str(installed_example) if installed else ""}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG_S)

    return run


def test_its_job_trains(run, tmp_path: Path) -> None:
    done = run(*FORGE_RUN, str(EXAMPLE / "job.toml"))
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "signsgd"
    losses = [line["loss"] for line in map(json.loads, (folder / "metrics.jsonl").open()) if "loss" in line]
    assert len(losses) == 20
    assert sum(losses[-3:]) < sum(losses[:3])
    assert json.loads((folder / "provenance.json").read_text())["distributions"][EXAMPLE.name]["version"] == "0.1.0"


def test_without_it_the_job_is_refused_with_the_line_that_installs_it(run, tmp_path: Path) -> None:
    qualified = f"--optimizer.type={EXAMPLE.name}/signsgd"  # as resolved jobs write it
    done = run(*FORGE_RUN, str(EXAMPLE / "job.toml"), qualified, installed=False)
    assert done.returncode == 2
    assert f"pip install {EXAMPLE.name}" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_naming_it_imports_no_torch(run) -> None:
    done = run(*FORGE_RUN, "plugins", EXAMPLE.name, "--check")
    assert done.returncode == 0, done.stderr
    assert "signsgd" in done.stdout
    assert "imports torch" not in done.stdout


def test_its_own_tests_pass(run) -> None:
    done = run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".", str(EXAMPLE / "tests"))
    assert done.returncode == 0, done.stdout
