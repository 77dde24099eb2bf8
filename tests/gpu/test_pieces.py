"""Every piece of the GPU benchmarks in its tiny form: on the CPU, and on CUDA where there is some."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gpu.pieces  # noqa: F401
from gpu.__main__ import main
from gpu.bench import PIECES, Bench, missing, write

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: torch finds none")


def run(name: str, device: str, folder: Path) -> Bench:
    if absent := missing(PIECES[name].requires):
        pytest.skip(f"needs {', '.join(absent)}, which is not installed")
    bench = Bench(torch.device(device), True, folder)
    PIECES[name].run(bench)
    return bench


@pytest.mark.parametrize("name", PIECES)
def test_a_piece_runs_on_the_cpu_in_its_tiny_form(name: str, tmp_path: Path) -> None:
    bench = run(name, "cpu", tmp_path / "runs")
    assert not bench.failures
    assert bench.tables
    write(name, bench, 1.0, tmp_path)
    assert json.loads((tmp_path / f"{name}.json").read_text())["tables"] == bench.tables
    assert f"# {name} (tiny form)" in (tmp_path / f"{name}.md").read_text()


@NO_CUDA
@pytest.mark.parametrize("name", [name for name, piece in PIECES.items() if piece.checks])
def test_a_piece_holds_on_cuda(name: str, tmp_path: Path) -> None:
    assert not run(name, "cuda", tmp_path / "runs").failures


def test_a_check_that_fails_is_a_failure_and_nan_is_no_small_error(tmp_path: Path) -> None:
    bench = Bench(torch.device("cpu"), True, tmp_path)
    bench.within("errors", 0.1, 0.2, what="small")
    assert not bench.failures
    bench.within("errors", 0.3, 0.2, what="large")
    bench.within("errors", float("nan"), 0.2, what="none")
    assert len(bench.failures) == 2
    assert [row["holds"] for row in bench.tables["errors"]] == [True, False, False]


def test_the_program_runs_from_a_checkout_that_is_not_installed(tmp_path: Path) -> None:
    """Without any metadata on the path but that which it writes: only what Forge imports is linked there."""
    site = tmp_path / "site"
    site.mkdir()
    for folder in map(Path, sys.path):
        for entry in folder.iterdir() if folder.name == "site-packages" else ():
            if not entry.name.lower().startswith(("forge", "_editable", "__editable", "_forge")):
                (site / entry.name).exists() or (site / entry.name).symlink_to(entry)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL"))}
    environment |= {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-S", "-W", "ignore", str(HERE), "--tiny", "--device", "cpu", "--piece", "experts"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out")], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "out" / "experts.json").read_text())
    assert not result["failures"]
    assert list((tmp_path / "out" / "metadata").glob("forge_run-*.dist-info/METADATA"))


def test_pieces_are_listed_and_an_unknown_one_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in PIECES)
    with pytest.raises(SystemExit, match="'nonsense'"):
        main(["--piece", "nonsense", "--out", str(tmp_path)])
