"""Keys that are tuned at every size and budget, against optima that are known."""

from __future__ import annotations

import json
import math
from itertools import product

import numpy as np
import pytest
from attrs import evolve
from known_ladders import EXPONENT, ladder
from test_ladder_command import JOB, TRUNK

from forge_core.contracts.errors import ExitCode, JobError
from forge_plugin_ladder.command import command
from forge_plugin_ladder.points import read_points, write_points
from forge_plugin_ladder.tuning import best_points, tune

RATE, BATCH = "optimizer.lr", "train.global_batch_size"


def best_rate(n, d):
    return 1.79 * n**-0.713 * d**0.307


def best_batch(d):
    return 0.58 * d**0.571


def tuned_ladder(rates=(0.25, 0.5, 1, 2, 4), batches=(), noise=0.0, seed=0, off=1.0, **keys):
    """Points of a ladder whose loss is a paraboloid around the best rate and batch; grids are `off` their optimum."""
    generator, points = np.random.default_rng(seed), []
    for point, (rate, batch) in product(ladder(**keys), product(rates, batches or (None,))):
        n, d = point.parameters, point.tokens
        # A grid of rates about a power law that is not the optimum's
        values = {RATE: rate * off * best_rate(n, d) * (n / 3e7) ** 0.05}
        away = math.log(values[RATE] / best_rate(n, d))
        rise = 0.01 * away**2
        if batch is not None:
            # A rate of its own for each batch, as a rule that is a function of the batch gives
            values |= {BATCH: batch * best_batch(d), RATE: values[RATE] * batch**0.5}
            beside = math.log(values[BATCH] / best_batch(d))
            rise = 0.01 * (away**2 + beside**2)
        factors = {RATE: rate} | ({} if batch is None else {BATCH: batch})
        loss = point.loss * math.exp(rise + (generator.normal(0, noise) if noise else 0.0))
        name = f"{point.run} {factors}"
        points.append(evolve(point, run=name, budget=f"{point.flops:.3g}", loss=loss, tuned=values, factors=factors))
    return points


def test_the_best_rate_and_batch_follow_from_sizes_and_tokens():
    found = tune(tuned_ladder(batches=(0.5, 1, 2)), count=5)
    # Parabolas of log(loss) are no parabolas of the loss, which moves a minimum by a part of a percent
    for key, exponents in ((RATE, (-0.713, 0.307)), (BATCH, (0, 0.571))):
        law = found[key].law
        assert (law.by_parameters, law.by_tokens) == pytest.approx(exponents, abs=2e-3)
        expected = best_rate(3e8, 6e9) if key == RATE else best_batch(6e9)
        assert law.at(3e8, 6e9) == pytest.approx(expected, rel=0.01)
        assert found[key].warnings == []


def test_intervals_of_exponents_cover_the_truth():
    inside = 0
    for seed in range(100):
        law = tune(tuned_ladder(noise=1e-3, seed=seed, rates=(0.3, 1, 3)), count=200)[RATE].law
        low, high = law.exponent_interval("by_parameters", 0.9)
        inside += low <= -0.713 <= high
    assert 82 <= inside <= 97


def test_the_law_of_the_loss_is_of_the_best_runs():
    points, plain = tuned_ladder(), ladder()
    best = best_points(points)
    assert [(each.parameters, each.tokens) for each in best] == [(each.parameters, each.tokens) for each in plain]
    # Nothing is chosen where nothing is tuned, and points without a loss stay
    plain[3] = evolve(plain[3], loss=math.nan, failed="diverged")
    assert repr(best_points(plain)) == repr(plain)


def test_a_rate_that_diverged_is_not_the_best_and_a_size_without_any_loss_is_named():
    points = tuned_ladder(rates=(0.5, 1, 2, 400))
    points = [evolve(each, failed="diverged") if each.factors[RATE] == 400 else each for each in points]
    first = points[0].parameters, points[0].tokens
    none = [evolve(each, failed="diverged") if (each.parameters, each.tokens) == first else each for each in points]
    assert len(best_points(none)) == 42 + 3
    assert sum(not each.usable for each in best_points(none)) == 4
    assert len(tune(none, 5)[RATE].law.optima) == 41
    assert tune(points, 5)[RATE].law.by_tokens == pytest.approx(0.307, abs=2e-3)


def test_an_optimum_at_the_end_of_its_values_is_left_out():
    found = tune(tuned_ladder(off=10, budgets=2, sizes=4), count=5)[RATE]
    assert found.law is None
    assert "optimizer.lr: with" in found.warnings[0]
    assert "the least that was tried" in found.warnings[0]
    assert found.warnings[-1] == "optimizer.lr: 0 best values, and a power of the scale needs 5"
    assert "the largest that was tried" in tune(tuned_ladder(off=0.1, budgets=2, sizes=4), count=5)[RATE].warnings[0]


def test_tokens_in_proportion_to_parameters_have_one_exponent():
    points = [each for each in tuned_ladder() if abs(each.tokens / each.parameters / 20 - 1) < 0.01]
    law = tune(points, count=5)[RATE].law
    # D = 20 N: the exponents of both together
    assert law.by_parameters == pytest.approx(-0.713 + 0.307, abs=2e-3)
    assert law.by_tokens == 0


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "job.toml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    return tmp_path


GRID = """
job = "job.toml"
output = "rungs"
[sizes.small]
dim = 8
[budgets]
tokens = [640, 1280]
[tune]
"optimizer.lr" = [0.5, 1, 2]
"train.global_batch_size" = [1, 2, 4]
[rules."optimizer.lr"]
type = "sqrt_batch"
at_reference = 1e-3
batch_tokens = 16
"""


def test_a_plan_has_each_combination_with_rules_that_see_the_batch(here, capsys):
    (here / "ladder.toml").write_text(GRID)
    assert command(["plan", "ladder.toml", "--json"]) == ExitCode.FINISHED
    runs = json.loads(capsys.readouterr().out)
    assert len(runs) == 18
    assert runs[5]["name"] == "small-640-tokens-lr-1x-global_batch_size-4x"
    assert runs[5]["tuned"] == pytest.approx({BATCH: 8, RATE: 2e-3})
    assert runs[5]["settings"]["train.global_batch_size"] == "8"
    assert runs[5]["steps"] * 64 == runs[5]["tokens"] == 640
    assert float(runs[2]["settings"]["optimizer.lr"]) == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("[0.5, 1, 2]", "[1, 2]", r"tune.optimizer.lr: \[1.0, 2.0\]: a best value is found among three"),
        ("[0.5, 1, 2]", "[1, 2, 2, 4]", "among three different ones"),
        ("[0.5, 1, 2]", "[0, 1, 2]", "must be > 0"),
        ('"optimizer.lr" =', '"train.steps" =', "tune.train.steps: the ladder sets this key itself"),
        ('"optimizer.lr" =', '"optimizer.rate" =', "tune.optimizer.rate: the job has None there"),
        ('"optimizer.lr" =', '"model.type" =', "of which there are no multiples"),
        ("[1, 2, 4]", "[1, 1.1, 2]", "are one run, as their values are rounded"),
        ("[rules", "[rules.'train.global_batch_size']\ntype='fixed'\nto=0.4\n[rules", "are one run"),
    ],
)
def test_a_wrong_grid_is_named(here, before, after, message):
    assert before in GRID
    (here / "ladder.toml").write_text(GRID.replace(before, after, 1))
    with pytest.raises(JobError, match=message):
        command(["plan", "ladder.toml"])


def test_runs_that_are_tuned_have_trunks_of_their_own(here, capsys):
    (here / "job.toml").write_text(JOB.replace("cosine", "wsd"))
    (here / "ladder.toml").write_text(TRUNK + '[tune]\n"optimizer.lr" = [0.5, 1, 2]\n')
    assert command(["plan", "ladder.toml", "--json"]) == ExitCode.FINISHED
    runs = json.loads(capsys.readouterr().out)
    assert [run["trunk"] for run in runs[:3]] == [f"small-320-tokens-lr-{factor}x" for factor in ("0.5", "1", "2")]


def test_tuned_runs_are_trained_and_their_points_know_the_values(here):
    of_rates = GRID.replace('"train.global_batch_size" = [1, 2, 4]\n', "")
    (here / "ladder.toml").write_text(of_rates.replace("[640, 1280]", "[160]"))
    assert command(["run", "ladder.toml"]) == ExitCode.FINISHED
    points = read_points(here / "rungs/points.json")
    assert [(point.factors[RATE], point.tuned[RATE]) for point in points] == [(0.5, 5e-4), (1, 1e-3), (2, 2e-3)]
    assert len({point.loss for point in points if point.usable}) == 3


def test_tuned_points_are_fitted_predicted_and_reported(here, capsys):
    points = tuned_ladder(noise=1e-3, rates=(0.5, 1, 2))
    write_points(here / "measured.json", points)
    (here / "ladder.toml").write_text(GRID)
    own = ["ladder.toml", "--points", "measured.json"]
    assert command(["fit", *own, "--resamples", "20", "--json"]) == ExitCode.FINISHED
    facts = json.loads(capsys.readouterr().out)
    assert facts["points"] == 42
    assert facts["best_size_exponent"] == pytest.approx(EXPONENT, rel=0.02)
    assert command(["predict", *own, "--flops", "1e19", "--json"]) == ExitCode.FINISHED
    [found] = json.loads(capsys.readouterr().out)
    value, (low, high) = found["tuned"][RATE]
    assert value == pytest.approx(best_rate(found["parameters"], found["tokens"]), rel=0.05)
    assert low < value < high
    assert command(["report", *own]) == ExitCode.FINISHED
    capsys.readouterr()
    report = (here / "rungs" / "report.md").read_text()
    assert all(point.run in report for point in points)

    # The rule as the report has it, in another ladder
    printed = report[report.index(f'[rules."{RATE}"]') : report.index("```", report.index("[rules"))]
    (here / "ladder.toml").write_text(GRID.partition("[tune]")[0] + printed)
    assert command(["plan", "ladder.toml", "--json"]) == ExitCode.FINISHED
    run = json.loads(capsys.readouterr().out)[0]
    rule = facts["tuned"][RATE]["law"]["rule"]
    powers = (run["parameters"] / rule["parameters"]) ** rule["by_parameters"]
    powers *= (640 / rule["tokens"]) ** rule["by_tokens"]
    assert float(run["settings"][RATE]) == pytest.approx(rule["at_reference"] * powers, rel=1e-4)
