"""The sink `probe`: what it learns, beside scipy's minimum of the same loss, under every layout."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file
from scipy.optimize import minimize
from scipy.special import log_softmax
from taps_stranger import job, run

from forge_core.contracts.errors import ForgeError
from forge_plugin_parallel import FSDP
from forge_plugin_taps import Probe, Store
from forge_plugin_taps.probe_sink import LinearProbe
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import at, check_problems, naming, problems_of

SETTINGS = {"interval": 1, "positions": "all", "points": ("layers.*.resid_post",), "checkpoint": {"interval": 4}}


def probes(**keys):
    return {"probe": Probe(target="id", classes=32, **keys)}


def measured(folder, key):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines if key in line]


def weights(folder):
    return {path.name: load_file(path) for path in sorted((folder / "probe").iterdir())}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    made = job(tmp_path_factory.mktemp("alone"), sinks={**probes(), "store": Store()}, **{**SETTINGS, "steps": 12})
    return run(made)


def test_a_probe_reads_tokens_from_the_residual_stream(alone):
    accuracy = measured(alone, "probe/probe/layers.0.resid_post/accuracy")
    assert len(accuracy) == 12
    assert accuracy[0] < 0.2
    assert accuracy[-1] > 0.9
    assert max(measured(alone, "probe/probe/layers.0.resid_post/majority")) < 0.2


def test_saved_weights_are_for_activations_as_they_are(alone):
    probe = weights(alone)["layers.0.resid_post.safetensors"]
    step = alone / "taps/step-12"
    values = load_file(step / "layers.0.resid_post.safetensors")["layers.0.resid_post"].float()
    right = (values @ probe["weight"].T + probe["bias"]).argmax(1) == load_file(step / "tokens.safetensors")["id"]
    assert right.double().mean() > 0.9


def test_it_reaches_the_minimum_that_scipy_finds():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 5, generator=generator) * torch.tensor([1.0, 100.0, 0.01, 1.0, 1.0]) + 3
    target = torch.randint(0, 3, (200,), generator=generator)
    target[x[:, 0] > 3] = 0
    probe = LinearProbe(5, 3, Probe(target="id", classes=3, lr=0.05, weight_decay=0.0, updates=600), x.device)
    probe.learn(x, target)
    standard = ((x.double() - x.double().mean(0)) / x.double().std(0, correction=0)).numpy()
    ones = np.eye(3)[target.numpy()]

    def loss(flat):
        weight, bias = flat[:15].reshape(3, 5), flat[15:]
        return -(ones * log_softmax(standard @ weight.T + bias, axis=1)).sum(1).mean()

    assert float(probe.measure(x, target)["loss"]) == pytest.approx(minimize(loss, np.zeros(18)).fun, rel=1e-4)


def test_held_out_sequences_are_never_trained_on(monkeypatch, tmp_path):
    calls = {"measure": [], "learn": []}
    for name, seen in calls.items():
        own = getattr(LinearProbe, name)
        monkeypatch.setattr(LinearProbe, name, lambda s, x, t, own=own, seen=seen: (seen.append(t), own(s, x, t))[1])
    target = "taps_stranger:rows"
    settings = {**SETTINGS, "points": ("layers.0.resid_post",), "checkpoint": {}}
    run(job(tmp_path, sinks={"probe": Probe(target=target, classes=8, held_out=0.25)}, **settings))
    for held, kept in zip(calls["measure"], calls["learn"], strict=True):
        assert len(held.unique()) == 2
        assert sorted([*held.unique().tolist(), *kept.unique().tolist()]) == list(range(8))
    assert len({tuple(held.unique().tolist()) for held in calls["measure"]}) > 1


def test_probes_are_the_same_on_two_ranks_and_continue_to_the_bit(alone, tmp_path):
    settings = {**SETTINGS, "parallel": {"fsdp": FSDP()}, "steps": 12}
    run_on_ranks(2, lambda rank: run(job(tmp_path / "whole", sinks=probes(), **settings)))
    run_on_ranks(2, lambda rank: run(job(tmp_path / "parts", sinks=probes(), **settings)))
    shutil.rmtree(tmp_path / "parts/run/checkpoints/step-12")
    shutil.rmtree(tmp_path / "parts/run/probe")
    run_on_ranks(2, lambda rank: run(job(tmp_path / "parts", sinks=probes(), **settings)))
    whole, parts, single = (weights(folder) for folder in (tmp_path / "whole/run", tmp_path / "parts/run", alone))
    assert whole.keys() == parts.keys() == single.keys()
    for name, probe in whole.items():
        for key, tensor in probe.items():
            assert torch.equal(tensor, parts[name][key])
            torch.testing.assert_close(tensor, single[name][key], rtol=1e-4, atol=1e-4)


def test_two_probes_in_one_folder_are_refused(tmp_path):
    sinks = {name: Probe(target="position", folder=folder) for name, folder in (("a", "x"), ("b", "x"), ("c", "y"))}
    check_problems(
        problems_of(job(tmp_path, sinks=sinks)),
        at("parallel.taps.sinks.a.folder", "'x'"),
        at("parallel.taps.sinks.b.folder", "'x'"),
    )


def test_steps_of_one_sequence_are_refused_as_none_is_left_to_learn_from(tmp_path):
    one = job(tmp_path, sinks={"a": Probe(target="position")})
    one = evolve(one, train=evolve(one.train, global_batch_size=1, micro_batch_size=1))
    check_problems(problems_of(one), at("parallel.taps.sinks.a.held_out", "train.global_batch_size", 2))


class Tokens:
    """Eight samples without activations."""

    step, points, tokens = 1, (), {"row": torch.arange(8)}

    def __len__(self):
        return 8


def sink(function=None, points=(), classes=3):
    seed = SimpleNamespace(job=SimpleNamespace(seed=0))
    context = SimpleNamespace(device=torch.device("cpu"), job=seed, load_object=lambda name: function)
    return Probe(target="x:y", classes=classes).build(context, SimpleNamespace(points=points, rows=8))


@pytest.mark.parametrize(
    ("returned", "facts"),
    [
        (torch.zeros(8), ["(8,) torch.float32"]),
        (torch.zeros(7, dtype=torch.int64), ["(7,) torch.int64"]),
        (torch.zeros(8, 1, dtype=torch.int64), ["(8, 1) torch.int64"]),
        ([0] * 8, ["[0, 0, 0, 0, 0, 0, 0, 0]"]),
    ],
)
def test_a_target_that_is_no_whole_number_for_each_sample_is_refused(returned, facts):
    with pytest.raises(ForgeError, match=naming("x:y", "(8,) integers", *facts)):
        sink(lambda tokens: returned).consume(Tokens())


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
def test_a_target_of_whole_numbers_is_taken(dtype):
    sink(lambda tokens: torch.zeros(8, dtype=dtype)).consume(Tokens())


def test_a_run_that_continues_with_other_classes_is_refused():
    probe = LinearProbe(2, 3, Probe(target="x:y", classes=3), torch.device("cpu"))
    state = {f"embed/{key}": value for key, value in probe.state().items()}
    sink(points=("embed",)).load_state_dict(state)
    with pytest.raises(ForgeError, match=naming("probe", "embed", "3 classes", "4 now")):
        sink(points=("embed",), classes=4).load_state_dict(state)


def test_unknown_targets_and_numbers_of_classes_are_refused(tmp_path):
    sinks = {"a": Probe(target="ids"), "b": Probe(folder="b"), "c": Probe(target="x:y", folder="c")}
    check_problems(
        problems_of(job(tmp_path, sinks=sinks)),
        at("parallel.taps.sinks.a.target", "'ids'", "id, label, position, source"),
        at("parallel.taps.sinks.b.classes", "tokenizer", "'label'"),
        at("parallel.taps.sinks.c.classes", "x:y"),
    )
