"""`forge-run checkpoints RUN merge`: averages of checkpoints, and averages in place of a decay of the rate."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen
from torch import Tensor

from forge_core.cli import main
from forge_core.contracts.components import OptimizerComponent, SchedulerComponent
from forge_core.contracts.errors import ExitCode
from forge_core.engine.trainer import Trainer
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.checkpoints import stored_tensors
from forge_kit.tools.trained_model import load_model
from forge_kit.tools.whole_tensors import read_whole
from forge_plugin_checkpoints import merge as merging
from forge_plugin_checkpoints.merge import SHAPES, decay_weights
from forge_plugin_checkpoints.parts import Parts
from forge_testing import TinyModel, tiny_job
from forge_testing.refusals import lacks


@frozen(kw_only=True)
class Slope(OptimizerComponent):
    """SGD whose gradient is the number of the step, whatever the loss: its path does not depend on the weights."""

    lr: float = 0.01

    def build(self, context: Any, parameters: Any) -> torch.optim.Optimizer:
        return Slopes([parameters.group(lr=self.lr)])


class Slopes(torch.optim.Optimizer):
    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 0.01})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                done = self.state[parameter].setdefault("done", 0)
                parameter.data.add_(math.sin(1 + done * (number + 1)), alpha=-group["lr"])
                self.state[parameter]["done"] = done + 1


@frozen(kw_only=True)
class DecayFrom(SchedulerComponent):
    """A constant rate up to a step, and a decay to 0 over as many again as `length`."""

    start: int
    length: int
    shape: str

    def build(self, context: Any) -> Any:
        return lambda step, total: SHAPES[self.shape](max(0, step - self.start) / self.length)


def trained(folder: Path, catalog: Catalog, **changes: Any) -> Path:
    settings = {"precision": "fp64", "optimizer": Slope(), "checkpoint": {"interval": 1, "keep": 0}, "steps": 8}
    job = tiny_job(str(folder), catalog, **settings | changes)
    return Trainer(job, catalog=catalog, echo=lambda text: None).run().folder


def weights_of(checkpoint: Path) -> dict[str, Tensor]:
    stored = stored_tensors(checkpoint)
    names = [name for name in stored if name.startswith("model.")]
    return read_whole(checkpoint, names, stored)


@pytest.fixture(scope="module")
def run(tmp_path_factory, catalog) -> Path:
    return trained(tmp_path_factory.mktemp("constant"), catalog)


@pytest.fixture
def merge(run, capsys, tmp_path):
    def call(*argv: str, of: Path = run) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = main(
                ["checkpoints", str(of), "merge", *argv, *([] if "--out" in argv else ["--out", str(tmp_path / "out")])]
            )
        except SystemExit as end:
            code = int(end.code or 0)
        return (code, *capsys.readouterr())

    return call


def step(run: Path, number: int) -> Path:
    return run / f"checkpoints/step-{number}"


@pytest.mark.parametrize("shape", list(SHAPES))
def test_merging_every_step_of_a_constant_rate_is_the_decay(merge, catalog, tmp_path, shape):
    """To rounding: a second run that decays from step 2 on ends where the checkpoints from step 2 on are merged."""
    decayed = trained(tmp_path, catalog, scheduler=DecayFrom(start=2, length=6, shape=shape))
    assert merge("--steps", "2,3,4,5,6,7,8", "--like", shape)[0] == 0
    found, expected = weights_of(step(tmp_path / "out", 0)), weights_of(step(decayed, 8))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-13, atol=1e-14, msg=name)
    constant = weights_of(step(decayed.parent / "run", 2))
    assert all(not torch.allclose(expected[name], constant[name]) for name in expected)


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("steps", [[10, 20, 30, 40], [7, 8, 15, 40, 41], [0, 5]])
def test_weights_of_sparse_checkpoints_apply_the_average_factor_of_each_interval(steps, shape):
    weights = decay_weights(steps, shape)
    assert sum(weights) == pytest.approx(1, abs=1e-15)
    assert min(weights) >= 0
    length = steps[-1] - steps[0]
    for number in range(1, len(steps)):
        factors = [SHAPES[shape]((s - steps[0]) / length) for s in range(steps[number - 1], steps[number])]
        assert sum(weights[number:]) == pytest.approx(sum(factors) / len(factors), abs=1e-14)


def test_of_every_step_a_linear_decay_is_the_mean_without_the_first():
    assert decay_weights([4, 5, 6, 7, 8], "linear") == pytest.approx([0, 0.25, 0.25, 0.25, 0.25])


@pytest.mark.parametrize(("option", "factors"), [([], [1 / 3] * 3), (["--weights", "3,1,0"], [0.75, 0.25, 0])])
def test_averages_are_those_of_float64(merge, run, tmp_path, monkeypatch, option, factors):
    monkeypatch.setattr(merging, "AT_A_TIME", 1)  # one tensor at a time
    code, out, _ = merge("--steps", "2,5,8", *option)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[:4]] == ["STEP", "2", "5", "8"]
    sources = [weights_of(step(run, number)) for number in (2, 5, 8)]
    for name, tensor in weights_of(step(tmp_path / "out", 0)).items():
        expected = sum(factor * source[name] for factor, source in zip(factors, sources, strict=True))
        torch.testing.assert_close(tensor, expected, rtol=1e-15, atol=1e-16, msg=name)


def test_weights_belong_to_their_steps_in_any_order(merge, tmp_path):
    merge("--steps", "8,2", "--weights", "3,1", "--out", str(tmp_path / "one"))
    merge("--steps", "2,8", "--weights", "1,3", "--out", str(tmp_path / "other"))
    one, other = (weights_of(step(tmp_path / name, 0)) for name in ("one", "other"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_narrow_weights_are_rounded_once(merge, catalog, tmp_path):
    """The average of float32 weights is the float32 number next to the exact average."""
    run = trained(tmp_path / "narrow", catalog, precision="fp32")
    assert merge("--steps", "1,4,8", of=run)[0] == 0
    sources = [weights_of(step(run, number)) for number in (1, 4, 8)]
    for name, tensor in weights_of(step(tmp_path / "out", 0)).items():
        assert tensor.dtype == torch.float32
        exact = sum(source[name].double() / 3 for source in sources)
        spacing = (torch.nextafter(tensor, torch.tensor(math.inf)) - tensor).double()
        assert ((tensor.double() - exact).abs() <= 0.5000001 * spacing).all()


# --- the result --------------------------------------------------------------------------------------------------


def test_programs_take_the_result_as_they_take_a_run(merge, run, tmp_path, catalog, capsys):
    assert merge("--steps", "6,8")[0] == 0
    out = tmp_path / "out"
    merged = weights_of(step(out, 0))
    model = load_model(out, device="cpu", catalog=catalog).model
    assert all(torch.equal(tensor, merged[f"model.{name}"]) for name, tensor in model.state_dict().items())
    assert main(["checkpoints", str(out), "verify"]) == 0
    assert main(["checkpoints", str(out), "export", "--out", str(tmp_path / "m.safetensors")]) == 0
    job = tiny_job(str(tmp_path / "new"), catalog, precision="fp64", steps=1, checkpoint={"load": Parts(path=str(out))})
    printed: list[str] = []
    Trainer(job, catalog=catalog, echo=printed.append).run()
    assert not lacks("\n".join(printed), f"{len(merged)} loaded", out)


def test_the_sources_are_recorded_with_their_digests(merge, run, tmp_path, capsys):
    facts = json.loads(merge("--steps", "4,8", "--like", "cosine", "--json")[1])
    manifest = json.loads((step(tmp_path / "out", 0) / "manifest.json").read_text())
    assert manifest["merged"] == {"like": "cosine", "sources": facts["sources"]}
    assert [(each["step"], each["path"]) for each in facts["sources"]] == [(n, str(step(run, n))) for n in (4, 8)]
    digests = [hashlib.sha256((step(run, n) / "manifest.json").read_bytes()).hexdigest() for n in (4, 8)]
    assert [each["digest"] for each in facts["sources"]] == digests
    main(["checkpoints", str(tmp_path / "out")])
    assert not lacks(capsys.readouterr().out, "merged, like a cosine decay", step(run, 4), step(run, 8))


def test_a_rate_that_fell_is_pointed_out(merge, run, catalog, tmp_path):
    decayed = trained(tmp_path / "decayed", catalog, scheduler=DecayFrom(start=2, length=6, shape="linear"))
    assert "not constant" in merge("--steps", "4,8", "--like", "linear", of=decayed)[1]
    assert "not constant" not in merge("--steps", "4,8", "--like", "linear", "--out", str(tmp_path / "b"))[1]


# --- refusals ----------------------------------------------------------------------------------------------------


def test_other_models_are_refused_by_name(merge, run, catalog, tmp_path):
    mixed = Path(shutil.copytree(run, tmp_path / "mixed"))
    larger = trained(tmp_path / "larger", catalog, model=TinyModel(layers=3), steps=1)
    shutil.rmtree(step(mixed, 1))
    shutil.copytree(step(larger, 1), step(mixed, 1))
    code, _, err = merge("--steps", "1,8", of=mixed)
    assert code == ExitCode.BAD_JOB
    assert not lacks(err, "layers.2.up.weight", "differ", "step-1", "step-8")
    assert not (tmp_path / "out").exists()


def test_other_settings_of_equal_shapes_are_refused(merge, run, catalog, tmp_path):
    mixed = Path(shutil.copytree(run, tmp_path / "mixed"))
    other = trained(tmp_path / "other", catalog, model=TinyModel(dropout=0.5), steps=1)
    shutil.rmtree(step(mixed, 1))
    shutil.copytree(step(other, 1), step(mixed, 1))
    code, _, err = merge("--steps", "1,8", of=mixed)
    assert code == ExitCode.BAD_JOB
    assert not lacks(err, "model.dropout", "0.5", "step-1", "step-8")


def test_nothing_is_overwritten(merge, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("mine")
    code, _, err = merge("--steps", "4,8")
    assert code == ExitCode.BAD_JOB
    assert "exists already" in err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_a_damaged_source_is_refused_and_nothing_is_left(merge, run, tmp_path):
    damaged = Path(shutil.copytree(run, tmp_path / "damaged"))
    file = next(step(damaged, 4).glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    code, _, err = merge("--steps", "4,8", of=damaged)
    assert code == ExitCode.FAILED
    assert f"{file} is damaged" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged"]


@pytest.mark.parametrize(("options", "words"), [
    (["--steps", "8"], ["two steps"]),
    (["--steps", "8,8"], ["each once"]),
    (["--steps", "4,99"], ["99", "1, 2, 3"]),
    (["--steps", "4,8", "--weights", "1"], ["--weights", "1", "2"]),
    (["--steps", "4,8", "--weights", "1,-1"], ["--weights", "1,-1", "none negative"]),
    (["--steps", "4,8", "--weights", "0,0"], ["--weights", "0,0", "not all 0"]),
    (["--steps", "4,8", "--weights", "1,half"], ["--weights", "1,half", "must be numbers"]),
    (["--steps", "4:8"], ["--steps", "4:8", "must be whole numbers"]),
    (["--steps", "4,8", "--weights", "1,2", "--like", "linear"], ["--like", "--weights"]),
    (["--steps", "4,8", "--like", "cubic"], ["cubic", "cosine"]),
])  # fmt: skip
def test_options_that_cannot_be_are_refused(merge, tmp_path, options, words):
    code, _, err = merge(*options)
    assert code == ExitCode.BAD_JOB
    assert not lacks(err, *words)
    assert not (tmp_path / "out").exists()


def test_integers_that_differ_have_no_average():
    with pytest.raises(Exception, match="integers"):
        merging._demand_equal(torch.tensor([1]), torch.tensor([2]), "model.count", Path("step-8"))
