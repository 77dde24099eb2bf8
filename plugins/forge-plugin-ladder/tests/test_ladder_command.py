"""`forge-run ladder` as its users run it."""

from __future__ import annotations

import json

import pytest
from known_ladders import EXPONENT, ladder

from forge_core.contracts.errors import ExitCode, JobError
from forge_plugin_ladder.command import command
from forge_plugin_ladder.points import read_points, write_points

JOB = """
[train]
steps = 9
global_batch_size = 2
seq_len = 8
[model]
type = "transformer"
dim = 8
layers = 1
vocab_size = 64
[model.attention]
heads = 2
[[data.sources]]
type = "forge_testing:Numbers"
[optimizer]
type = "adamw"
[scheduler]
type = "cosine"
"""
LADDER = """
job = "job.toml"
output = "rungs"
seeds = [1, 2]
[sizes.small]
dim = 8
[sizes.large]
dim = 16
attention.heads = 4
[budgets]
tokens_per_parameter = [0.1]
flops = [1e8]
[rules."optimizer.lr"]
type = "sqrt_batch"
at_reference = 1e-3
batch_tokens = 16
[rules."train.global_batch_size"]
type = "fixed"
to = 4
[rules."scheduler.warmup_steps"]
type = "fixed"
to = 2.9
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "ladder.toml").write_text(LADDER)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def planned(capsys):
    assert command(["plan", "ladder.toml", "--json"]) == ExitCode.FINISHED
    return json.loads(capsys.readouterr().out)


def test_a_plan_has_every_run_with_its_size_and_budget(here, capsys):
    runs = planned(capsys)
    assert len(runs) == 8
    assert [run["name"] for run in runs[:4]] == ["small-0.1x-s1", "small-0.1x-s2", "small-1e+08-s1", "small-1e+08-s2"]
    for run in runs:
        # Whole steps of four sequences of eight tokens
        assert run["tokens"] == run["steps"] * 32
        assert run["parameters_total"] - run["parameters"] in (2 * 64 * 8, 2 * 64 * 16)
        assert run["settings"]["train.global_batch_size"] == "4"
        # The batch is known to the other rules: twice that of the reference
        assert float(run["settings"]["optimizer.lr"]) == pytest.approx(1e-3 * 2**0.5)
        assert run["settings"]["scheduler.warmup_steps"] == "3"
    small, large = runs[2], runs[6]
    assert small["flops"] == pytest.approx(1e8, rel=0.05)
    assert large["flops"] == pytest.approx(1e8, rel=0.05)
    assert small["steps"] > large["steps"]
    assert command(["plan", "ladder.toml"]) == ExitCode.FINISHED
    assert "8 runs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("[budgets]\ntokens_per_parameter = [0.1]\nflops = [1e8]", "[budgets]", "there is no budget"),
        ('[rules."optimizer.lr"]', '[rules."train.steps"]', "the ladder sets this key itself"),
        ('"sqrt_batch"', '"sqrt_bach"', "sqrt_batch"),
        ("at_reference = 1e-3", "at_reference = -1", "at_reference"),
        ("seeds", "seed", "unknown key"),
        ("dim = 16", "dimm = 16", "dimm"),
        ("flops = [1e8]", "flops = [1.0001e8, 1.0002e8]", "2 runs are called small-1e\\+08-s1"),
        ('"job.toml"', '"jobs.toml"', "jobs.toml"),
        ('[rules."optimizer.lr"]', '[rules."optimizer.rate"]', "rate"),
    ],
)
def test_mistakes_are_named_before_anything_is_trained(here, before, after, message):
    text = LADDER.replace(before, after, 1)
    assert text != LADDER
    (here / "ladder.toml").write_text(text)
    with pytest.raises(JobError, match=message):
        command(["plan", "ladder.toml"])
    assert not (here / "rungs").exists()


def test_points_of_ones_own_are_fitted_predicted_and_reported(here, capsys):
    write_points(here / "measured.json", ladder(noise=0.002, seed=7))
    own = ["ladder.toml", "--points", "measured.json"]
    with pytest.raises(JobError, match="fit` first"):
        command(["predict", *own, "--flops", "1e19"])
    assert command(["fit", *own, "--resamples", "40", "--json"]) == ExitCode.FINISHED
    facts = json.loads(capsys.readouterr().out)
    assert facts["best_size_interval"][0] < facts["best_size_exponent"] < facts["best_size_interval"][1]
    assert facts["best_size_exponent"] == pytest.approx(EXPONENT, rel=0.02)
    assert facts["held_out"]["points"] == 7
    assert command(["predict", *own, "--flops", "1e19", "1e20"]) == ExitCode.FINISHED
    assert len(capsys.readouterr().out.strip().splitlines()) == 3
    with pytest.raises(JobError, match="--far"):
        command(["predict", *own, "--flops", "1e21"])
    assert command(["report", *own]) == ExitCode.FINISHED
    report = (here / "rungs" / "report.md").read_text()
    assert all(point.run in report for point in ladder())
    assert (here / "rungs" / "report.png").read_bytes().startswith(b"\x89PNG")


STRANGER = """
import numpy as np
from attrs import frozen
from forge_plugin_ladder import Law
from forge_plugin_ladder.rules import Rule


@frozen(kw_only=True)
class OfCompute(Law):
    \"\"\"L = E + A / (6 N D)^gamma.\"\"\"

    coefficients = ("E", "A")
    exponents = {"gamma": (0.01, 1.0)}
    source = "a stranger"

    def terms(self, exponents, sizes):
        flops = 6 * sizes.parameters * sizes.tokens
        return np.stack([np.ones_like(flops), flops ** -exponents[0]], axis=1)


@frozen(kw_only=True)
class Third(Rule):
    \"\"\"A third of the steps' tokens.\"\"\"

    def value(self, scale):
        return scale.tokens / 3e6
"""


def test_a_stranger_adds_a_law_and_a_rule_in_one_file(here, capsys):
    (here / "mine.py").write_text(STRANGER)
    text = LADDER.replace('"sqrt_batch"\nat_reference = 1e-3\nbatch_tokens = 16', '"./mine.py:Third"')
    (here / "ladder.toml").write_text(text.replace("[budgets]", '[law]\ntype = "./mine.py:OfCompute"\n[budgets]'))
    assert float(planned(capsys)[0]["settings"]["optimizer.lr"]) < 1e-3
    write_points(here / "measured.json", ladder(loss=lambda n, d: 1.5 + 40 * (6 * n * d) ** -0.1))
    own = ["ladder.toml", "--points", "measured.json"]
    assert command(["fit", *own, "--resamples", "10", "--json"]) == ExitCode.FINISHED
    values = json.loads(capsys.readouterr().out)["values"]
    assert values == pytest.approx({"E": 1.5, "A": 40, "gamma": 0.1}, rel=1e-4)
    # FLOPs alone do not tell sizes apart
    with pytest.raises(JobError, match=r"no size is the best of 1e\+20 FLOPs"):
        command(["predict", *own, "--flops", "1e20"])


@pytest.mark.thorough
def test_runs_are_trained_and_become_points(here, capsys):
    text = LADDER.replace("seeds = [1, 2]\n", "").replace("flops = [1e8]\n", "")
    (here / "ladder.toml").write_text(text)
    assert command(["run", "ladder.toml"]) == ExitCode.FINISHED
    points = read_points(here / "rungs" / "points.json")
    assert [point.run for point in points] == ["small-0.1x", "large-0.1x"]
    assert all(point.usable and point.held_out for point in points)
    capsys.readouterr()
    # Finished runs are not trained again, and a budget more trains its runs alone
    (here / "ladder.toml").write_text(text.replace("[0.1]", "[0.1, 0.2]"))
    assert command(["run", "ladder.toml"]) == ExitCode.FINISHED
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["1/2", "2/2"]
