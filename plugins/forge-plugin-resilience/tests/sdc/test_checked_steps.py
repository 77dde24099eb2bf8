"""Steps that are computed twice: what a flipped bit does, and what no flipped bit does not."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
from flipped_bits import LAYOUTS, Dropout, FlipsGradient, curve, curves

from forge_core import load_job
from forge_plugin_resilience.sdc import SDC
from forge_plugin_resilience.sdc.faults import Record
from forge_testing.refusals import lacks, refuses
from forge_testing.tiny import TINY_JOB


def faults(folder, name="run"):
    return [fault for line in Record(folder / name).lines() for fault in line["faults"]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """layout -> curves without a fault and with one in either computation of a checked step; and their folder."""

    @functools.cache
    def train(layout):
        folder = tmp_path_factory.mktemp(layout)
        flips = [FlipsGradient(rank=LAYOUTS[layout][0] - 1, wrong=(computation,)) for computation in (0, 1)]
        checked = {f"wrong-{n}": {"plugins": {"flips": flip, "sdc": SDC(every=2)}} for n, flip in enumerate(flips)}
        return folder, curves(folder, layout, None, {"right": {}, **checked})

    return train


@pytest.mark.parametrize("layout", ["one", "ddp2", "fsdp2", pytest.param("tp2", marks=pytest.mark.thorough), "pp2"])
@pytest.mark.parametrize("computation", [0, 1])
def test_a_transient_fault_is_mended_and_its_rank_named(computation, layout, trained):
    folder, made = trained(layout)
    assert made[f"wrong-{computation}"] == made["right"]
    [fault] = faults(folder, f"wrong-{computation}")
    assert (fault["step"], fault["rank"]) == (4, LAYOUTS[layout][0] - 1)
    assert not lacks(fault["what"], ("first", "second")[computation], "step 4")


def test_a_flipped_bit_matters_where_no_step_is_checked(tmp_path, trained):
    assert curve(tmp_path, plugins={"flips": FlipsGradient(rank=0)}) != trained("one")[1]["right"]


def test_of_ranks_that_compute_alone_any_may_be_named(tmp_path):
    curve(tmp_path, layout="ddp2", plugins={"flips": FlipsGradient(rank=0), "sdc": SDC(every=4)})
    assert [fault["rank"] for fault in faults(tmp_path)] == [0]


@pytest.mark.parametrize("layout", [pytest.param("one", marks=pytest.mark.thorough), "ddp2"])
def test_a_lasting_fault_ends_the_run_on_every_rank_and_saves_nothing(tmp_path, layout, trained):
    rank = LAYOUTS[layout][0] - 1
    plugins = {"flips": FlipsGradient(rank=rank, wrong=(0, 1, 2)), "sdc": SDC(every=4)}
    ends = curve(tmp_path, layout=layout, plugins=plugins, checkpoint={"interval": 3})
    assert {end[:2] for end in ends} == {("CorruptionError", 77)}
    assert not lacks(ends[0][2], f"rank {rank}", "step 4", "three results")
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-3"]
    # The machine left out, the same command continues.
    plugins["flips"] = FlipsGradient(rank=99)
    continued = curve(tmp_path, layout=layout, plugins=plugins, checkpoint={"interval": 3})
    assert continued == trained(layout)[1]["right"]


def test_with_warn_the_run_goes_on(tmp_path):
    plugins = {"flips": FlipsGradient(rank=0, wrong=(0, 1, 2)), "sdc": SDC(every=4, on_fault="warn")}
    [rows] = curve(tmp_path, plugins=plugins)
    assert [row[0] for row in rows] == [1, 2, 3, 4, 5]
    assert [fault["step"] for fault in faults(tmp_path)] == [4]


@pytest.mark.parametrize("layout", ["pp2", pytest.param("ep2", marks=pytest.mark.thorough)])
def test_clean_steps_of_dropout_and_experts_give_no_alarm_and_the_same_curve(tmp_path, layout):
    runs = {"plain": {"drop": Dropout()}, "run": {"drop": Dropout(), "sdc": SDC(every=1)}}
    made = curves(tmp_path, layout, "moe", {name: {"steps": 8, "plugins": parts} for name, parts in runs.items()})
    assert made["run"] == made["plain"]
    lines = list(Record(tmp_path / "run").lines())
    assert [line["step"] for line in lines] == [*range(1, 9)]
    assert not faults(tmp_path)
    assert {len(line["gradients"]) for line in lines} == {2}
    assert len({digest for line in lines for digest in line["gradients"]}) == 16


@pytest.mark.parametrize(
    "layout", ["one", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("cp2", "ep2", "pp2-fsdp2"))]
)
def test_a_fault_is_mended_with_all_that_routers_count(tmp_path, layout):
    rank = min(LAYOUTS[layout][0] - 1, 1)
    plugins = {"flips": FlipsGradient(rank=rank), "sdc": SDC(every=2)}
    made = curves(tmp_path, layout, "moe", {"right": {}, "run": {"plugins": plugins}})
    assert made["run"] == made["right"]
    assert [fault["rank"] for fault in faults(tmp_path)] == [rank]


def test_norms_within_a_tolerance_are_no_fault(tmp_path):
    checks = {"run": SDC(every=4, tolerance=0.5), "exact": SDC(every=4)}
    runs = {name: {"plugins": {"flips": FlipsGradient(rank=0, bit=18), "sdc": check}} for name, check in checks.items()}
    curves(tmp_path, "one", None, runs)
    assert not faults(tmp_path)
    assert faults(tmp_path, "exact")


def test_a_gpu_that_does_not_repeat_itself_is_refused(tmp_path):
    text = TINY_JOB.replace("[train]", '[train]\ndevice = "cuda"') + "[plugins.sdc]\n"
    with refuses("plugins.sdc.tolerance", "kernels"):
        load_job(text)
    load_job(text + "tolerance = 1e-3\n")
    load_job(text.replace("[train]", "[train]\ndeterministic = true"))
    automatic = load_job(text.replace('device = "cuda"', 'device = "auto"'))  # what it is is known in the build only
    context = SimpleNamespace(device=torch.device("cuda"), job=automatic)
    with refuses("plugins.sdc.tolerance", "kernels"):
        next(SDC().forge_build_executor(context, None))
    next(SDC(tolerance=1e-3).forge_build_executor(context, None))
