"""`forge-run ladder` as its users run it."""

from __future__ import annotations

import json
import sys

import pytest
from known_ladders import EXPONENT, ladder

from forge_core.cli import main
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
    cells = [f"{size}-{budget}" for size in ("small", "large") for budget in ("0.1x", "1e08")]
    names = [f"{cell}-seed-{seed}" for cell in cells for seed in (1, 2)]
    assert [run["name"] for run in runs] == names
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


def test_a_size_has_no_run_of_a_budget_that_is_too_small_or_large_for_it(here, capsys):
    ratios = sorted(run["tokens"] / run["parameters"] for run in planned(capsys)[::2])
    between = f"least_ratio = {1.01 * ratios[0]}\nlargest_ratio = {0.99 * ratios[-1]}\nflops"
    (here / "ladder.toml").write_text(LADDER.replace("flops", between))
    assert sorted(run["tokens"] / run["parameters"] for run in planned(capsys)[::2]) == ratios[1:-1]


def test_batches_that_grow_are_counted_by_their_schedule(here, capsys):
    # Ten steps of one sequence of eight tokens, and then two sequences each
    grown = "[train.batch_schedule]\ntype = 'piecewise'\nbatch_sizes = [1, 2]\nstart_tokens = [80]\n[model]"
    (here / "job.toml").write_text(JOB.replace("[model]", grown, 1))
    (here / "ladder.toml").write_text(TRUNK.replace("trunk = true", ""))
    assert [(run["steps"], run["tokens"]) for run in planned(capsys)] == [(15, 160), (25, 320)]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("[budgets]\ntokens_per_parameter = [0.1]\nflops = [1e8]", "[budgets]", "there is no budget"),
        ("flops = [1e8]", "flops = [1e8]\nleast_ratio = 1e9", "small, large has none within least_ratio"),
        ('[rules."optimizer.lr"]', '[rules."train.steps"]', "the ladder sets this key itself"),
        ('"sqrt_batch"', '"sqrt_bach"', "sqrt_batch"),
        ("at_reference = 1e-3", "at_reference = -1", "at_reference"),
        ("seeds", "seed", "unknown key"),
        ("dim = 16", "dimm = 16", "dimm"),
        ('"fixed"\nto = 2.9', '"power"\nat_reference = 100\ntokens = 320\nby_tokens = 2', "in small-1e08-seed-1, "),
        ("flops = [1e8]", "flops = [1.0001e8, 1.0002e8]", "2 runs are called small-1e08-seed-1"),
        ('"job.toml"', '"jobs.toml"', "jobs.toml"),
        ("seeds", "trunk = true\nseeds", "small-0.1x-seed-1 cannot .* shares 4 of its 20 steps: `scheduler` has"),
        ("seeds", 'trunk = true\nrules."checkpoint.keep" = {type = "fixed", to = 1}\nseeds', "sets this key itself"),
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


def test_a_plan_has_memory_and_hours_of_plan_and_names_what_does_not_fit(here, capsys, monkeypatch):
    # The optimizer's numbers change no tensor: both runs are simulated once
    huge = '[sizes.huge]\ndim = 16384\n[rules."optimizer.lr"]\ntype = "power"\nat_reference = 1e-3\nby_tokens = -0.1\n'
    (here / "job.toml").write_text(JOB.replace("cosine", "wsd"))
    (here / "ladder.toml").write_text(TRUNK.replace("trunk = true", "").replace("[budgets]", huge + "[budgets]"))
    assert command(["plan", "ladder.toml", "--gpu", "l40s", "--json"]) == ExitCode.FINISHED
    small, longer, large, _ = json.loads(capsys.readouterr().out)
    assert main(["plan", "job.toml", "--model.dim=8", "--gpu=l40s", "--json"]) == 0
    [rank] = json.loads(capsys.readouterr().out)["ranks"]
    assert small["memory"] == longer["memory"] == rank["peak"]
    # l40s has 48 GB; weights, gradients and two moments of 16 bytes for each parameter are a lower bound
    assert large["memory"] > 16 * large["parameters_total"] > 48e9
    seconds = max(rank["seconds_at_least"].values())
    assert [small["hours"], longer["hours"]] == pytest.approx([10 * seconds / 3600, 20 * seconds / 3600], rel=1e-12)
    assert large["remark"].startswith("does not fit: ")
    assert small["remark"] == ""
    with pytest.raises(JobError, match="not in the table"):
        command(["plan", "ladder.toml", "--gpu", "none"])
    for wrong in (["--network", "3"], ["--nproc", "2"]):
        with pytest.raises(JobError, match=wrong[0]):
            command(["plan", "ladder.toml", *wrong])
    monkeypatch.setitem(sys.modules, "forge_plugin_plan.estimate", None)
    with pytest.raises(
        JobError, match=r"by forge-plugin-plan, which is not installed\n.*pip install forge-plugin-plan"
    ):
        command(["plan", "ladder.toml", "--memory"])


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


TRUNK = """
job = "job.toml"
output = "rungs"
trunk = true
[sizes.small]
dim = 8
[budgets]
tokens = [160, 320]
"""


def test_a_plan_with_trunks_says_where_runs_branch(here, capsys):
    (here / "job.toml").write_text(JOB.replace("cosine", "wsd"))
    (here / "ladder.toml").write_text(TRUNK)
    short, long = planned(capsys)
    assert (short["trunk"], short["branch_step"], short["steps"]) == ("small-320-tokens", 9, 10)
    assert (long["trunk"], long["branch_points"]) == ("", [9])
    assert command(["plan", "ladder.toml"]) == ExitCode.FINISHED
    assert "small-320-tokens at 9" in capsys.readouterr().out
    (here / "ladder.toml").write_text(TRUNK.replace("trunk = true", '[rules."checkpoint.keep"]\ntype="fixed"\nto = 1'))
    assert command(["plan", "ladder.toml"]) == ExitCode.FINISHED
    assert "`trunk = true` they take 1.41e+07 FLOPs" in capsys.readouterr().out


def final_state(run, step):
    """SHA-256 of weights, optimizer and generators at the end of a run, and the losses and rates of its steps."""
    files = json.loads((run / f"checkpoints/step-{step}/manifest.json").read_text())["files"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return files, {line["step"]: (line["loss"], line["lr"], line["grad_norm"]) for line in lines if "loss" in line}


@pytest.mark.thorough
def test_runs_are_trained_and_branches_equal_separate_runs_to_the_bit(here, capsys):
    (here / "job.toml").write_text(JOB.replace("cosine", "wsd"))
    (here / "ladder.toml").write_text(TRUNK)
    assert command(["run", "ladder.toml"]) == ExitCode.FINISHED
    points = read_points(here / "rungs/points.json")
    assert [(point.run, point.trunk) for point in points] == [
        ("small-160-tokens", "small-320-tokens"),
        ("small-320-tokens", ""),
    ]
    assert all(point.usable and point.held_out for point in points)
    # Neither has the hook of a trunk
    for steps in (10, 20):
        assert main(["job.toml", "--model.dim=8", f"--train.steps={steps}", f"--job.name=alone-{steps}"]) == 0
        files, losses = final_state(here / f"rungs/runs/small-{16 * steps}-tokens", steps)
        alone, expected = final_state(here / f"runs/alone-{steps}", steps)
        assert files == alone
        assert losses == {step: each for step, each in expected.items() if step in losses}
        assert len(losses) == (1 if steps == 10 else 20)
    # Finished runs are not trained again, and a budget more trains its runs alone: the trunk has step 9, and not 13
    capsys.readouterr()
    (here / "ladder.toml").write_text(TRUNK.replace("160,", "160, 240,"))
    assert command(["run", "ladder.toml"]) == ExitCode.FINISHED
    lines = capsys.readouterr().out.splitlines()
    assert "small-320-tokens has no checkpoint of step 13, so it is trained from step 9 on" in lines[1]
    assert [line.split()[:2] for line in lines[::2]] == [["1/1", "small-320-tokens"], ["1/1", "small-240-tokens"]]
    assert main(["job.toml", "--model.dim=8", "--train.steps=15", "--job.name=alone-15"]) == 0
    assert final_state(here / "rungs/runs/small-240-tokens", 15)[0] == final_state(here / "runs/alone-15", 15)[0]
