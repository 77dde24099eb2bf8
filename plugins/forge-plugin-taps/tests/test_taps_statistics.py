"""The sink `statistics`, beside scipy and numpy on what the sink `store` has kept of the same samples."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from scipy.stats import entropy, kurtosis
from taps_stranger import job, run

from forge_plugin_taps import PointInfo, Statistics, Store
from forge_plugin_taps.samples import LocalPart
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing.laws import Case, layout_law
from forge_testing.layouts import LayoutCase
from forge_testing.refusals import at, check_problems, problems_of

PIPELINE = {"pp": {"degree": 2}, "tp": {"degree": 2, "sequence_parallel": False}}
DIVIDED = {"pp2_tp2": LayoutCase(ranks=4, parallel=PIPELINE)}


def lines(folder, file="taps/statistics.jsonl"):
    return [json.loads(line) for line in (folder / file).read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    sinks = {"statistics": Statistics(dead_below=0.3, log=("norm", "kurtosis")), "store": Store()}
    return run(job(tmp_path_factory.mktemp("alone"), sinks=sinks))


def test_figures_are_those_of_all_values(alone):
    assert [line["step"] for line in lines(alone)] == [2, 4, 6]
    line = lines(alone)[1]
    for name, own in line["points"].items():
        values = load_file(alone / f"taps/step-4/{name}.safetensors")[name].numpy()
        assert values.shape == (24, 16 if "resid" in name else 32)
        expected = {
            "norm": np.linalg.norm(values, axis=1).mean(),
            "mean": values.mean(),
            "variance": values.var(),
            "kurtosis": kurtosis(values, axis=None, fisher=False),
            "max": np.abs(values).max(),
            "dead": (np.abs(values).max(0) <= 0.3).mean(),
            "not_finite": 0,
        }
        assert {key: own[key] for key in expected} == pytest.approx(expected, rel=1e-12)
        edges = [-np.inf, *line["edges"], np.inf]
        # numpy's bins have their lower edge, ours the upper one
        assert own["histogram"] == np.histogram(-values, -np.array(edges)[::-1])[0][::-1].tolist()
    assert line["points"]["layers.0.mlp_hidden"]["dead"] > 0


def test_chosen_scalars_are_in_the_lines_of_metrics(alone):
    logged = {line["step"]: line for line in lines(alone, "metrics.jsonl") if "loss" in line}
    names = {name for name in logged[4] if name.startswith("taps/")}
    assert names == {f"taps/{point}/{key}" for point in lines(alone)[1]["points"] for key in ("norm", "kurtosis")}
    assert logged[4]["taps/layers.1.resid_post/norm"] == lines(alone)[1]["points"]["layers.1.resid_post"]["norm"]
    assert not {name for name in logged[3] if name.startswith("taps/")}


def figures(folder, layout):
    run(job(folder, parallel=layout.get("parallel", {}), sinks={"statistics": Statistics(dead_below=0.3)}))
    return lines(folder / "run") if not dist.is_initialized() or dist.get_rank() == 0 else []


def the_same(ranks, alone):
    for line, expected in zip(ranks[0], alone, strict=True):
        for name, own in line["points"].items():
            other = expected["points"][name]
            assert own["histogram"] == other["histogram"]
            numbers = {key: value for key, value in own.items() if key != "histogram"}
            assert numbers == pytest.approx({key: other[key] for key in numbers}, rel=1e-12, abs=1e-13), name


test_layouts = layout_law(Case("statistics", observe=figures, compare=the_same, layouts=DIVIDED))


MODEL = Transformer(vocab_size=32, dim=16, layers=2, attention=GroupedQueryAttention(heads=4))


def attention(folder, layout, **sinks):
    sinks = {"statistics": Statistics(log=("entropy", "max")), **sinks}
    run(
        job(
            folder,
            points=("layers.*.pattern", "layers.*.z", "layers.*.resid_post"),
            sinks=sinks,
            parallel=layout,
            model=MODEL,
            steps=2,
        )
    )
    return lines(folder / "run") if not dist.is_initialized() or dist.get_rank() == 0 else []


def test_the_entropy_of_attention_is_a_mean_over_queries_and_heads(tmp_path):
    [line] = attention(tmp_path, {}, store=Store())
    logged = {name: value for each in lines(tmp_path / "run", "metrics.jsonl") for name, value in each.items()}
    for name in ("layers.0.pattern", "layers.1.pattern"):
        values = load_file(tmp_path / f"run/taps/step-2/{name}.safetensors")[name].numpy()
        assert values.shape[:2] == (24, 4)
        expected = entropy(values, axis=-1).mean()
        assert line["points"][name]["entropy"] == pytest.approx(expected, rel=1e-12)
        assert logged[f"taps/{name}/entropy"] == line["points"][name]["entropy"]
    assert "entropy" not in line["points"]["layers.0.z"]
    assert "taps/layers.0.z/entropy" not in logged
    assert logged["taps/layers.0.z/max"] > 0


ATTENTION = ("fsdp2_tp2", "fsdp2_cp2")
test_entropies = layout_law(
    Case(
        "entropy",
        observe=lambda f, layout: attention(f, layout.get("parallel", {})),
        compare=the_same,
        layouts=ATTENTION,
    )
)


def test_entropy_of_points_without_attention_is_refused(tmp_path):
    made = job(tmp_path, sinks={"statistics": Statistics(log=("entropy",))})
    check_problems(problems_of(made), at("parallel.taps.sinks.statistics.log", "entropy", "layers.*.pattern"))


def test_a_run_that_continues_has_each_line_once(alone, tmp_path):
    keys = {"sinks": {"statistics": Statistics(dead_below=0.3)}, "checkpoint": {"interval": 3}}
    run(made := job(tmp_path, **keys))
    shutil.rmtree(tmp_path / "run/checkpoints/step-6")
    run(made)
    assert lines(tmp_path / "run") == lines(alone)


def test_values_that_are_not_finite_are_counted():
    values = torch.tensor([[1.0, torch.nan], [torch.inf, -3.0]])
    part = LocalPart(values, torch.arange(2), None, True)
    context = SimpleNamespace(folder=None, device=torch.device("cpu"))
    taps = SimpleNamespace(points={"x": PointInfo("rest", None)})

    class Two:
        step, tokens, points = 1, {}, ("x",)
        __len__ = lambda self: 2  # noqa: E731
        local = lambda self, name: part  # noqa: E731
        shape = lambda self, name: (2, 2)  # noqa: E731

    sink = Statistics(edges=(0.0,), log=("not_finite",)).build(context, taps=taps)
    written = []
    sink._lines = SimpleNamespace(log=written.append)
    sink.consume(Two())
    sink.settle()
    assert {name: float(value) for name, value in sink.metrics().items()} == {"taps/x/not_finite": 2}
    assert written[0]["points"]["x"]["histogram"] == [1, 1]
    assert written[0]["points"]["x"]["mean"] == "nan"


def test_edges_that_do_not_ascend_and_one_file_for_two_are_refused(tmp_path):
    sinks = {"a": Statistics(edges=(1.0, 1.0)), "b": Statistics()}
    check_problems(
        problems_of(job(tmp_path, sinks=sinks)),
        at("parallel.taps.sinks.a.edges", "ascending", "[1.0, 1.0]"),
        at("parallel.taps.sinks.a.file", "'taps/statistics.jsonl'"),
        at("parallel.taps.sinks.b.file", "'taps/statistics.jsonl'"),
    )
