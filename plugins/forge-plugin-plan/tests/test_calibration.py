"""Measurements of a run, and plans by them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from torch.distributed.device_mesh import init_device_mesh

from forge_core.cli import main
from forge_core.contracts.errors import JobError
from forge_core.parallel.mesh import leave_group
from forge_plugin_plan import Calibration, collectives
from forge_plugin_plan.fake_world import Line
from forge_plugin_plan.gpus import GPUS
from forge_plugin_plan.machine import Machine
from forge_plugin_plan.measurements import Collective, Measurements, Product, Step, seconds_of
from forge_plugin_plan.meter import Transfer
from forge_plugin_plan.probes import SIZES, measure
from forge_testing.pretend import NAME, on_device
from forge_testing.processes import run_on_ranks
from forge_testing.suites import HookSuite

JOB = """
[job]
name = "measured"
output = "runs"
[train]
steps = 6
global_batch_size = 4
seq_len = 32
precision = "fp32"
device = "cpu"
[model]
type = "transformer"
dim = 32
layers = 1
[model.attention]
heads = 2
[optimizer]
type = "adamw"
[data.tokenizer]
type = "bytes"
[[data.sources]]
type = "text"
path = "text.txt"
[hooks.calibration]
"""
SMALL = Collective(kind="all-gather", ranks=8, per_node=8, bytes=1000, seconds=20e-6)
LARGE = evolve(SMALL, bytes=1_001_000, seconds=120e-6)
FOUND = Measurements(
    device="NVIDIA H100 80GB HBM3",
    memory=80 << 30,
    torch="2.13.0",
    bandwidth=2.5e12,
    launch=7e-6,
    products=[Product(dtype="bfloat16", size=8192, flops=600e12), Product(dtype="bfloat16", size=4096, flops=500e12)],
    collectives=[SMALL, LARGE],
    step=Step(seconds=0.5, steps=20, job="0123"),
)


class TestCalibration(HookSuite):
    component = Calibration(warmup=1, steps=3)


def test_a_run_writes_a_file_by_which_its_plan_states_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(JOB)
    Path("text.txt").write_text("What is measured is known. " * 200)
    assert main(["job.toml"]) == 0
    file = Path("runs/measured/calibration.json")
    found = Measurements.read(file)
    assert (found.device, found.step and found.step.steps) == ("cpu", 3)
    leave_group()
    capsys.readouterr()
    assert main(["plan", "job.toml", "--calibrate", str(file), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    product = found.product("float32")
    assert product is not None
    [rank] = facts["ranks"]
    assert rank["seconds_at_least"]["compute"] == pytest.approx(rank["flops"] / product.flops)
    error = facts["calibration"]
    assert error["predicted"] == max(rank["seconds_at_least"].values())
    assert error["error"] == pytest.approx(error["predicted"] / error["measured"] - 1)
    # Of another job, only the machine counts
    leave_group()
    assert main(["plan", "job.toml", "--model.layers=2", "--calibrate", str(file)]) == 0
    out = capsys.readouterr().out
    assert "no step to compare with: model, batch, precision, stages or optimizer are not those" in out
    assert "TFLOP/s (float32, measured)" in out


def test_measured_figures_take_the_place_of_the_data_sheet_and_it_has_the_rest() -> None:
    machine = Machine.calibrated(FOUND, None, 50e9, "bfloat16")
    assert (machine.flops, machine.bandwidth, machine.launch) == (600e12, 2.5e12, 7e-6)
    assert (machine.name, machine.peak, machine.link) == ("H100 SXM", GPUS["h100"].flops, 450e9)
    line, transfer = Line("shard", 8, 8), Transfer("all-gather", "group", 501_000, 8)
    assert machine.wait(transfer, line, 450e9) + transfer.sent / 450e9 == pytest.approx(70e-6)
    # A kind that was not measured, and another number of ranks
    for other, ranks in ((evolve(transfer, kind="all-reduce"), 8), (evolve(transfer, ranks=4), 4)):
        line = Line("shard", ranks, ranks)
        expected = collectives.seconds(other, line, 450e9)
        assert machine.wait(other, line, 450e9) + other.sent / 450e9 == pytest.approx(expected)


def test_the_time_of_a_collective_lies_between_measured_ones() -> None:
    assert [seconds_of([LARGE, SMALL], size) for size in (10, 1000, 501_000, 2_002_000)] == pytest.approx(
        [20e-6, 20e-6, 70e-6, 240e-6]
    )


def test_what_was_not_measured_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"no products of float32 were measured.*; of bfloat16"):
        Machine.calibrated(FOUND, None, 50e9, "float32")
    unknown = Machine.calibrated(evolve(FOUND, device="Other", collectives=()), None, 50e9, "bfloat16")
    with pytest.raises(JobError, match="no collective within a node, which tp"):
        unknown.within_node(Line("tp", 2, 2))
    facts = json.loads(json.dumps({"schema": 1, **_facts()}))
    for change, message in (
        ({"schema": 2}, "`schema` must be 1"),
        ({"bandwidth": -1}, "'bandwidth' must be > 0"),
        ({"speed": 1}, "unexpected keyword argument 'speed'"),
        ({"products": [{"dtype": "float32"}]}, "missing 2 required"),
    ):
        path = tmp_path / "calibration.json"
        path.write_text(json.dumps(facts | change))
        with pytest.raises(JobError, match=message):
            Measurements.read(path)
    with pytest.raises(JobError, match="No such file"):
        Measurements.read(tmp_path / "nowhere.json")


def _facts() -> dict[str, Any]:
    from attrs import asdict

    return asdict(FOUND)


def test_its_file_comes_back(tmp_path: Path) -> None:
    FOUND.write(tmp_path / "calibration.json")
    assert Measurements.read(tmp_path / "calibration.json") == FOUND


def of_device() -> Measurements:
    return measure(torch.device(NAME), torch.float32, None)


def test_the_pretended_device_is_measured() -> None:
    found = on_device(of_device)
    assert found.device == "pretended device"
    assert found.product("float32") is not None
    assert found.memory > 0


def of_ranks(rank: int) -> Measurements:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    return measure(torch.device("cpu"), torch.float32, mesh)


def test_collectives_of_each_group_are_measured() -> None:
    found, _ = run_on_ranks(2, of_ranks)
    kinds = [(each.kind, each.ranks, each.per_node, each.bytes) for each in found.collectives]
    assert kinds == [(kind, 2, 2, size) for kind in ("all-reduce", "all-gather", "reduce-scatter") for size in SIZES]
