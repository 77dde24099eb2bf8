"""The sink in jobs of a stranger's model: files, metrics, several ranks, runs that continue, mistakes."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from sae_stranger import job, run, sae

from forge_core.contracts.errors import ForgeError
from forge_core.contracts.layout import Layout
from forge_plugin_parallel import FSDP
from forge_plugin_sae import BatchTopK, JumpReLU, LossRecovered, TopK
from forge_plugin_sae.model import load
from forge_plugin_sae.training import Trainer
from forge_plugin_taps import PointInfo, Store, TapsInfo
from forge_testing.laws import Case, layout_law
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import at, check_problems, naming, problems_of

TRANSCODERS = {"points": ("*.resid_pre", "*.mlp_out"), "output": "mlp_out", "folder": "transcoders"}
SINKS = {
    "sae": sae(activation=BatchTopK(k=3)),
    "transcoders": sae(activation=JumpReLU(target_l0=3.0, bandwidth=0.1), **TRANSCODERS),
}
EVALUATIONS = {"eval": {"interval": 4}, "evaluations": {n: LossRecovered(sink=n, sequences=6) for n in SINKS}}
KEYS = {"explained_variance", "l0", "loss", "dead", "updates"}


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def evaluated(folder):
    """Figures of the evaluations, of all steps that have them."""
    found = [{name: value for name, value in line.items() if name.startswith("eval/sae/")} for line in lines(folder)]
    figures = {(number, name): value for number, line in enumerate(found) for name, value in line.items()}
    assert len(figures) == 2 * (2 + 4 * 4)
    return figures


def weights(folder):
    paths = sorted(folder.glob("*/layers.*/cfg.json"))
    return {str(path.parent.relative_to(folder)): load(path.parent).state_dict() for path in paths}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run(job(tmp_path_factory.mktemp("alone"), sinks={**SINKS, "store": Store()}, **EVALUATIONS))


def test_every_point_has_its_autoencoder_and_every_pair_its_transcoder(alone):
    assert sorted(weights(alone)) == [
        *(f"sae/layers.{number}.resid_post" for number in range(2)),
        *(f"transcoders/layers.{number}.resid_pre" for number in range(2)),
    ]
    config = json.loads((alone / "transcoders/layers.1.resid_pre/cfg.json").read_text())
    assert config["metadata"]["hook_name"] == "layers.1.resid_pre"
    assert config["metadata"]["hook_name_out"] == "layers.1.mlp_out"


def test_a_transcoder_maps_its_point_to_its_output(alone):
    from safetensors.torch import load_file

    step, point = alone / "taps/step-8", "layers.0.resid_pre"
    x, y = (load_file(step / f"{name}.safetensors")[name] for name in (point, "layers.0.mlp_out"))
    coder = load(alone / "transcoders" / point)
    left = (y - coder(x)).square().sum() / (y - y.mean(0)).square().sum()
    assert left < 0.85  # 512 rows teach little, but more than the mean


def test_lines_have_the_figures_of_steps_with_updates(alone):
    logged = {line["step"]: line for line in lines(alone) if "loss" in line}
    of_step = {step: {name for name in line if name.startswith("sae/sae/")} for step, line in logged.items()}
    assert not of_step[1]  # the buffer takes all of its 64 rows
    assert of_step[2] == {f"sae/sae/layers.{number}.resid_post/{key}" for number in range(2) for key in KEYS}
    assert [logged[step]["sae/sae/layers.0.resid_post/updates"] for step in (2, 8)] == [2, 14]
    assert logged[8]["sae/sae/layers.0.resid_post/l0"] == pytest.approx(3, abs=1e-9)
    first, last = (logged[step]["sae/sae/layers.0.resid_post/explained_variance"] for step in (2, 8))
    assert last > max(first, 0.3)


def trained(folder, layout):
    """The autoencoders of a run, and what its evaluations have measured; on the first rank."""
    run(job(folder, sinks=SINKS, parallel=layout.get("parallel", {}), **EVALUATIONS))
    if dist.is_initialized() and dist.get_rank():
        return None
    return weights(folder / "run"), evaluated(folder / "run")


def the_same(ranks, alone):
    (found, figures), (expected, expected_figures) = ranks[0], alone
    assert found.keys() == expected.keys()
    for name, state in expected.items():
        for key, tensor in state.items():
            torch.testing.assert_close(found[name][key], tensor, rtol=1e-9, atol=1e-9)
    assert figures == pytest.approx(expected_figures, rel=1e-7, abs=1e-9)


test_layouts = layout_law(
    Case("autoencoders", observe=trained, compare=the_same, layouts=("fsdp2_tp2", "pp2")),
)


def test_two_ranks_that_continue_train_the_same_to_the_bit(alone, tmp_path):
    def both(rank):
        return [run(job(tmp_path, **settings, job={"name": name})) for name in names]

    settings = {"sinks": SINKS, "parallel": {"fsdp": FSDP()}, "checkpoint": {"interval": 3, "keep": 0}}
    names = ["whole", "parts"]
    run_on_ranks(2, both)
    parts = tmp_path / "parts"
    for left_behind in ("checkpoints/step-8", "checkpoints/step-6", "sae", "transcoders"):
        shutil.rmtree(parts / left_behind)
    names = ["parts"]
    run_on_ranks(2, both)
    expected = weights(tmp_path / "whole")
    assert len(expected) == 4
    for name, state in weights(parts).items():
        for key, tensor in expected.pop(name).items():
            assert torch.equal(state[key], tensor), (name, key)
    assert not expected
    for a, b in zip(lines(tmp_path / "whole"), lines(parts), strict=True):
        assert {k: v for k, v in a.items() if "sae" in k} == {k: v for k, v in b.items() if "sae" in k}


def test_each_point_is_trained_by_one_rank(tmp_path, monkeypatch):
    def trained(rank):
        seen = []
        own = Trainer.add
        monkeypatch.setattr(Trainer, "add", lambda self, *parts: (seen.append(id(self)), own(self, *parts))[1])
        run(job(tmp_path, parallel={"fsdp": FSDP()}))
        return len(set(seen))

    assert run_on_ranks(2, trained) == [1, 1]


def test_mistakes_are_refused_when_the_job_is_checked(tmp_path):
    sinks = {"a": sae(batch=65), "b": sae(activation=TopK(k=25)), "c": sae(folder="c", activation=JumpReLU())}
    sinks_at = "parallel.taps.sinks"
    check_problems(
        problems_of(job(tmp_path, sinks=sinks)),
        at(f"{sinks_at}.a.batch", 65, "64 rows"),
        at(f"{sinks_at}.a.folder", "'sae'"),
        at(f"{sinks_at}.b.activation", "k = 25", "24 latents"),
        at(f"{sinks_at}.b.folder", "'sae'"),
        at(f"{sinks_at}.c.activation", "target_l0 = 32", "24 latents"),
    )


def test_an_output_that_is_not_captured_is_named(tmp_path):
    sinks = {"sae": sae(points=("*.resid_pre",), output="mlp_in")}
    with pytest.raises(ForgeError, match=naming("layers.0.mlp_in", "layers.0.resid_pre")):
        run(job(tmp_path, sinks=sinks))
    with pytest.raises(ForgeError, match=naming("layers.0.resid_post", "16 features", "k = 32", "16 latents")):
        run(job(tmp_path, sinks={"sae": sae(latents=0, expansion=1, activation=TopK())}, job={"name": "b"}))


def info(*names, axes="full"):
    points = {name: PointInfo(axes, 0) for name in names}
    return TapsInfo(points=points, interval=1, rows=8, positions=8, length=8)


def built(settings, taps):
    names = SimpleNamespace(job=SimpleNamespace(seed=0, name="run"))
    return settings.build(SimpleNamespace(device=torch.device("cpu"), layout=Layout(), job=names), taps)


@pytest.mark.parametrize(
    ("keys", "taps", "facts"),
    [
        ({}, info("layers.0.pattern", axes="pattern"), ["layers.0.pattern", "width"]),
        ({"output": "mlp_out"}, info("layers.0.mlp_out"), ["mlp_out", "no point"]),
    ],
)
def test_points_that_cannot_be_trained_on_are_refused(keys, taps, facts):
    with pytest.raises(ForgeError, match=naming(*facts)):
        built(sae(**keys), taps)


def trained(settings=None, width=16):
    return Trainer(settings or sae(), width, None, "seed", torch.device("cpu"))


def test_a_run_that_continues_with_other_points_is_refused():
    state = {f"embed/{key}": value for key, value in trained().state().items()} | {"rows": 7}
    sink = built(sae(), info("embed"))
    sink.load_state_dict(state)
    assert sink.rows == 7
    with pytest.raises(ForgeError, match=naming("sae", "differ in final_norm")):
        built(sae(), info("embed", "final_norm")).load_state_dict(state)
    with pytest.raises(ForgeError, match=naming("sae", "differ in embed, final_norm")):
        built(sae(), info("final_norm")).load_state_dict(state)


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        (sae(buffer=65), ["[64, 16]", "[65, 16]", "`buffer`"]),
        (sae(latents=25), ["24", "25"]),
        (sae(activation=JumpReLU(target_l0=3.0)), ["threshold"]),
    ],
)
def test_a_run_that_continues_with_another_autoencoder_is_refused(settings, facts):
    with pytest.raises(ForgeError, match=naming(*facts)):
        trained(settings).load(trained().state())
