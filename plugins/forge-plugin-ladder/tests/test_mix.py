"""`forge-run data mix`: laws that are known, limits on repetition, and the command as its users run it."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from forge_core.cli import main
from forge_core.config.load import load_job
from forge_core.contracts.errors import JobError
from forge_plugin_ladder.mix.command import command
from forge_plugin_ladder.mix.mixture import Mix, Parts, mixtures
from forge_plugin_ladder.mix.proposal import limits, propose
from forge_plugin_ladder.mix.regression import fit_mixture, rank_correlation

NATURAL = np.array([0.6, 0.3, 0.1])
PARTS = Parts(("web", "code", "math"), ("web", "code", "math"), np.eye(3), NATURAL)
FLOORS = np.array([1.5, 0.8])
SLOPES = np.array([[-0.2, 0.9, 0.5], [0.4, -1.5, -0.3]])
"""The first metric wants web, the second code."""


def values_of(shares, noise=0.0, seed=0):
    plain = FLOORS + np.exp(shares @ SLOPES.T)
    return plain * np.exp(np.random.default_rng(seed).normal(0, noise, plain.shape) if noise else 0)


def fitted(shares, values, count=5, weights=(1.0, 1.0)):
    return fit_mixture(shares, values, ("a", "b"), np.array(weights), count)


def test_a_known_law_comes_back_and_its_best_mixture_is_that_of_a_grid():
    shares = mixtures(Mix(job="", runs=12), PARTS)
    fit = fitted(shares, values_of(shares), weights=(1.0, 3.0))
    for law, floor, slopes in zip(fit.laws, FLOORS, SLOPES, strict=True):
        assert law.floor == pytest.approx(floor, abs=1e-4)
        assert law.slopes == pytest.approx(slopes, abs=1e-4)
    assert rank_correlation(shares, values_of(shares), fit.weights) == pytest.approx(1)
    bounds = np.array([1.0, 0.55, 1.0])
    found = propose(fit, PARTS, bounds, regularization=0.05)
    # Every mixture in steps of a two-hundredth, within the limit of code
    steps = np.arange(0, 1.0001, 0.005)
    grid = np.array([(web, code, 1 - web - code) for web in steps for code in steps if web + code <= 1 + 1e-9])
    grid = np.clip(grid[grid[:, 1] <= 0.55 + 1e-9], 0, 1)
    loss = (values_of(grid) @ [0.25, 0.75]) + 0.05 * np.sum(grid * np.log(np.maximum(grid, 1e-12) / NATURAL), axis=1)
    assert found.shares == pytest.approx(grid[loss.argmin()], abs=0.006)
    assert found.natural == pytest.approx(values_of(NATURAL) @ [0.25, 0.75], abs=1e-4)
    assert found.gain == pytest.approx(found.natural - values_of(found.shares) @ [0.25, 0.75], abs=1e-4)


def test_the_interval_of_the_gain_covers_the_truth():
    shares, inside, bounds = mixtures(Mix(job="", runs=16), PARTS), 0, np.ones(3)
    for seed in range(20):
        found = propose(fitted(shares, values_of(shares, 0.003, seed), 40), PARTS, bounds, 0.05)
        truth = float((values_of(NATURAL) - values_of(found.shares)).mean())
        inside += found.gain_interval[0] <= truth <= found.gain_interval[1]
    # 90 % of 20, within three deviations
    assert 14 <= inside <= 20


def test_mixtures_are_around_the_natural_one_and_tell_parts_apart():
    shares = mixtures(Mix(job="", runs=200), PARTS)
    assert shares.sum(1) == pytest.approx(np.ones(200))
    assert shares[0] == pytest.approx(NATURAL)
    assert shares.mean(0) == pytest.approx(NATURAL, abs=0.06)
    assert len(np.unique(shares.round(6), axis=0)) == 200
    assert np.all((shares == 0) | (shares >= 0.02))
    assert np.array_equal(shares, mixtures(Mix(job="", runs=200), PARTS))
    # A source that the natural mixture leaves out is tried
    none = Parts(PARTS.names, PARTS.sources, PARTS.inner, np.array([0.7, 0.3, 0.0]))
    assert mixtures(Mix(job="", runs=20), none)[1:, 2].mean() > 0.1


def test_no_source_is_passed_more_often_than_it_may_be():
    grouped = Parts(("old", "math"), ("web", "code", "math"), np.array([[0.75, 0.25, 0], [0, 0, 1.0]]), NATURAL[:2])
    sizes = {"web": math.inf, "code": 1e6, "math": 2e6}
    epochs = {"web": 4.0, "code": 2.0, "math": 0.0}
    # 10M tokens: 2M of code, which is a quarter of the group
    assert limits(grouped, sizes, epochs, 1e7) == pytest.approx([0.8, 1.0])
    assert limits(grouped, sizes, epochs, 0) == pytest.approx([1.0, 1.0])
    # 200 thousand of code, a quarter of the group, and two million of math
    scarce = sizes | {"code": 1e5}
    with pytest.raises(JobError, match=r"max_epochs leaves 0.28 of 1e\+07 tokens"):
        limits(grouped, scarce, epochs | {"math": 1.0}, 1e7)


def test_too_few_or_equal_mixtures_are_refused():
    shares = mixtures(Mix(job="", runs=12), PARTS)
    with pytest.raises(JobError, match="5 proxies have a result, and a law of 3 parts needs 6"):
        fitted(shares[:5], values_of(shares[:5]))
    equal = np.repeat(shares[:2], 6, axis=0)
    with pytest.raises(JobError, match="do not tell all parts apart"):
        fitted(equal, values_of(equal))


JOB = """
[train]
steps = 12
global_batch_size = 4
seq_len = 8
[model]
type = "forge_testing:TinyModel"
[[data.sources]]
type = "forge_testing:Numbers"
name = "web"
weight = 3
[[data.sources]]
type = "forge_testing:Numbers"
name = "code"
weight = 1
sequences = 40
max_epochs = 2
[optimizer]
type = "forge_testing:TinyAdamW"
"""
MIX = """
job = "job.toml"
output = "mixed"
runs = 5
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "mix.toml").write_text(MIX)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def results(noise, slope=0.6, runs=12):
    """A file of results of other programs, of which the second metric is not asked for."""
    shares = np.stack([np.linspace(0.1, 0.9, runs), 1 - np.linspace(0.1, 0.9, runs)], axis=1)
    values = 1.5 + np.exp(shares @ [slope, -slope]) + np.random.default_rng(0).normal(0, noise, runs)
    rows = [
        {"run": f"run {number}", "shares": list(own), "values": {"eval/loss": value, "other": 1.0}}
        for number, (own, value) in enumerate(zip(shares, values, strict=True))
    ]
    return {"schema": 1, "parts": ["web", "code"], "sizes": {"code": 1e6}, "proxies": rows}


def test_proxies_are_trained_and_counted(here, capsys):
    assert command(["plan", "mix.toml", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned[0] == {"run": "natural", "shares": {"web": 0.75, "code": 0.25}}
    assert main(["data", "mix", "run", "mix.toml"]) == 0
    found = json.loads((here / "mixed/proxies.json").read_text())
    assert found["sizes"] == {"code": 40 * 8, "web": pytest.approx(found["sizes"]["web"])}
    assert [each["failed"] for each in found["proxies"]] == [""] * 5
    # Two mixtures may be one in 48 sequences
    assert len({each["values"]["eval/loss"] for each in found["proxies"]}) >= 4
    job = load_job(here / "mixed/runs/mix-1/job.toml")
    weights = [source.weight for source in job.data.sources]
    assert weights == pytest.approx([*planned[1]["shares"].values()])
    # A source that has reached its limit would change the mixture on the way
    assert [source.max_epochs for source in job.data.sources] == [0, 0]


def test_the_best_mixture_is_written_into_a_job_with_its_gain(here, capsys):
    (here / "mix.toml").write_text(MIX + "tokens = 4e6\n")
    (here / "results.json").write_text(json.dumps(results(0.002)))
    own = ["mix.toml", "--results", "results.json"]
    assert command(["fit", *own, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    # The law wants code alone, which may be passed twice: half of four million
    assert facts["weights"] == pytest.approx({"web": 0.5, "code": 0.5}, abs=1e-6)
    assert facts["epochs"] == pytest.approx({"code": 2.0})
    assert facts["gain_interval"][0] < facts["gain"] < facts["gain_interval"][1]
    assert command(["fit", *own]) == 0
    assert "code: 2.00 passes" in capsys.readouterr().out
    assert command(["write", *own, "--out", "new.toml"]) == 0
    assert [source.weight for source in load_job(here / "new.toml").data.sources] == pytest.approx([0.5, 0.5])
    assert f"smaller by {facts['gain']:.4f}" in (here / "new.toml").read_text()
    (here / "mine.toml").write_text("mine")
    with pytest.raises(JobError, match=r"mine\.toml"):
        command(["write", *own, "--out", "mine.toml"])


def test_no_job_is_written_where_the_gain_may_be_none(here):
    (here / "results.json").write_text(json.dumps(results(0.05, slope=0)))
    with pytest.raises(JobError, match="and may be none"):
        command(["write", "mix.toml", "--results", "results.json", "--out", "new.toml"])
    assert not (here / "new.toml").exists()


@pytest.mark.parametrize(
    ("mix", "job", "message"),
    [
        (MIX.replace("runs = 5", "runs = 4"), JOB, "4, but a law of 2 parts has 3 values and needs 5"),
        (MIX + "[natural]\nwebb = 1\n", JOB, "natural.webb: the job has no such source, but web, code; did you mean"),
        (MIX + "[natural]\nweb = 0\n", JOB, "natural: all amounts are 0"),
        (MIX + "[metrics]\n'eval/loss' = 0\n", JOB, "metrics: all amounts are 0"),
        (MIX + "[groups.web]\ncode = 1\n", JOB, "groups.web: is the name of a source"),
        (MIX + "[groups.a]\ncode = 1\n[groups.b]\ncode = 1\n", JOB, "code are in two groups"),
        (MIX + "[groups.a]\ncode = 1\nweb = 1\n", JOB, "groups: a mixture needs two parts"),
        (MIX, JOB.replace('name = "code"\n', ""), "job: its sources 1 have no name"),
        (MIX, JOB + "[[data.phases]]\nstart_step = 3\nlr_factor = 0.5\n", "job: has phases"),
        (MIX, JOB + "[data]\ntemperature = 2.0\n", "job: has a temperature"),
        (MIX.replace("runs", "run"), JOB, "unknown key"),
    ],
)
def test_mistakes_are_named_before_anything_is_trained(here, mix, job, message):
    (here / "mix.toml").write_text(mix)
    data = job.partition("[data]\n")
    (here / "job.toml").write_text("[data]\n" + data[2] + data[0] if data[1] else job)
    with pytest.raises(JobError, match=message):
        command(["plan", "mix.toml"])
    assert not (here / "mixed").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 2}, "schema 2"),
        ({"parts": ["web", "math"]}, "is of the parts web, math"),
        ({"proxies": [{"run": "a", "shares": [0.5, 0.6], "values": {}}]}, "1 together"),
        ({"proxies": [{"run": "a", "shares": [0.5, 0.5], "values": {}}]}, "a has no eval/loss"),
        ({"proxies": [{"run": "a", "shares": [0.5]}]}, "one for each part"),
    ],
)
def test_wrong_results_are_named(here, changes, message):
    (here / "results.json").write_text(json.dumps(results(0.1) | changes))
    with pytest.raises(JobError, match=message):
        command(["fit", "mix.toml", "--results", "results.json"])


def test_a_job_of_other_sources_is_refused(here):
    (here / "results.json").write_text(json.dumps(results(0.002)))
    (here / "other.toml").write_text(JOB.replace('"code"', '"books"'))
    with pytest.raises(JobError, match="has the sources web, books, and the proxies web, code"):
        command(["write", "mix.toml", "--results", "results.json", "--out", "new.toml", "--job", "other.toml"])
