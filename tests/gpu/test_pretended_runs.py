"""Whole runs on the pretended device: the numbers of the CPU, and no fault of streams or mixed devices."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from forge_pretend import VARIABLE
from forge_testing.curves import Curve, Difference
from forge_testing.pretend import NAME, on_device
from forge_testing.processes import run_on_ranks
from gpu.rank_runs import CASES, curve, results_on_devices
from gpu.whole_runs import ALONE, HERE, Outcome, lines_of, train_all, write_data

pytestmark = pytest.mark.slow

TOLERANCE = {"soap": 2e-3, "float8": 1e-3, "watched": 1e-4}
"""Relative, of all metrics, where it is not 2e-5: eigenvectors, roundings and probes turn the last digit into more."""
NEAR_ZERO = 1e-6
"""Absolute, for metrics that are differences."""


def everything(folder: str) -> tuple[dict[str, Any], dict[str, Outcome]]:
    """In a process with the device: first runs on ranks that it forks, as autograd starts for good when it is used."""
    return results_on_devices(folder), train_all(folder, NAME)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of data for each device."""
    folder = tmp_path_factory.mktemp("runs")
    for device in ("cpu", NAME):
        write_data(folder / device)
    return folder


@pytest.fixture(scope="module")
def on_both(home: Path) -> tuple[dict[str, Any], dict[str, Outcome]]:
    return on_device(everything, str(home / NAME))


@pytest.fixture(scope="module")
def on_ranks(on_both: Any) -> Mapping[str, Any]:
    return on_both[0]


@pytest.fixture(scope="module")
def pretended(on_both: Any) -> Mapping[str, Outcome]:
    return on_both[1]


@pytest.fixture(scope="module")
def on_cpu(home: Path) -> Mapping[str, Outcome]:
    return run_on_ranks(1, lambda rank: train_all(str(home / "cpu"), "cpu"))[0]


def same(lines: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Any]], tolerance: float = 2e-5) -> None:
    assert [line.keys() for line in lines] == [line.keys() for line in expected]
    for line, other in zip(lines, expected, strict=True):
        assert line == pytest.approx(other, rel=tolerance, abs=NEAR_ZERO), line.get("step")


@pytest.mark.parametrize("name", ALONE)
def test_a_run_has_the_lines_of_the_cpu(
    name: str, pretended: Mapping[str, Outcome], on_cpu: Mapping[str, Outcome]
) -> None:
    assert not pretended[name].error
    assert not on_cpu[name].error
    same(pretended[name].lines, on_cpu[name].lines, TOLERANCE.get(name, 2e-5))


@pytest.mark.parametrize(
    ("name", "declared", "counted"),
    [
        ("text", "none a step", {}),
        ("lion", 'one, to decide on the update (non_finite = "skip") a step', {"step.py": 1}),
        ("soap", "none a step; one every 1 updates, for the bases of SOAP", {"eigenbasis.py": 1}),
    ],
)
def test_the_summary_of_a_run_has_the_number_of_waits(
    name: str, declared: str, counted: Mapping[str, int], pretended: Mapping[str, Outcome]
) -> None:
    assert pretended[name].declared == declared
    assert {where.partition(":")[0]: count for where, count in pretended[name].counted.items()} == counted


@pytest.fixture(scope="module")
def alone() -> Curve:
    found = curve("", "cpu")
    assert found is not None
    return found


@pytest.mark.parametrize("layout", CASES)
def test_ranks_have_the_curve_of_one_process(layout: str, on_ranks: Mapping[str, Any], alone: Curve) -> None:
    found = on_ranks[layout]
    assert isinstance(found, Curve), found
    difference = Difference.between(found, alone)
    assert difference.initial == 0, difference
    assert max(difference.loss, difference.norm, difference.gradient, difference.evaluation) < 1e-12, difference
    assert difference.weights < 1e-10, difference


def test_hooks_that_compare_ranks_leave_the_run_as_it_is(
    on_ranks: Mapping[str, Any], on_cpu: Mapping[str, Outcome]
) -> None:
    found = on_ranks["ranks"]
    assert not found.error
    for line, other in zip(found.lines, on_cpu["text"].lines, strict=True):
        assert {key: line[key] for key in other} == pytest.approx(other, rel=2e-5, abs=NEAR_ZERO)


def forge(home: Path, device: str, *arguments: str) -> str:
    """Run a command; on the CPU, in a process that does not have the other device."""
    environment = {**os.environ, VARIABLE: "1" if device == NAME else "0"}
    command = [sys.executable, "-m", "forge_core", *arguments]
    done = subprocess.run(
        command, cwd=home / NAME, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_launched_run_of_two_ranks_has_the_lines_of_one(home: Path, pretended: Mapping[str, Outcome]) -> None:
    job = [str(HERE / "jobs" / "text.toml"), "--train.device", NAME, "--job.name", "launched", "--nproc=2"]
    forge(home, NAME, *job, "--parallel.fsdp.reshard_after_forward=true")
    same(lines_of(home / NAME / "runs" / "launched"), pretended["text"].lines)


@pytest.mark.usefixtures("pretended")
def test_a_checkpoint_of_one_device_is_read_on_the_other(home: Path) -> None:
    arguments = "generate", "runs/watched", "--prompt", "the 1", "--max-tokens", "8", "--temperature", "0"
    texts = [forge(home, device, *arguments, "--device", device) for device in ("cpu", NAME)]
    assert texts[0] == texts[1]
