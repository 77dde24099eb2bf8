"""Predictions and parabolas against closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
from attrs import evolve
from known_ladders import EXPONENT, LAW, ladder, loss_of

from forge_core.contracts.errors import JobError
from forge_plugin_ladder import Additive
from forge_plugin_ladder.fitting import fit
from forge_plugin_ladder.intervals import resample
from forge_plugin_ladder.parabolas import iso_flops
from forge_plugin_ladder.prediction import held_out, predict


def resampled(points, count=30):
    return resample(fit(Additive(), points), points, count=count)


def test_the_best_size_is_the_closed_form():
    # Hoffmann et al. 2022, equation 4
    points = ladder()
    found = predict(resampled(points, 5), 1e19, points)
    of_size = (LAW["alpha"] * LAW["A"] / (LAW["beta"] * LAW["B"])) ** (1 / (LAW["alpha"] + LAW["beta"]))
    n = of_size * (1e19 / 6) ** EXPONENT
    assert found.parameters == pytest.approx(n, rel=1e-4)
    assert found.tokens == pytest.approx(1e19 / 6 / n, rel=1e-4)
    assert found.loss == pytest.approx(loss_of(n, 1e19 / 6 / n), rel=1e-9)


def test_a_model_with_dear_small_sizes_has_its_own_cost():
    # FLOPs of a token that are no multiple of parameters: 60 N^0.9
    points = [evolve(point, tokens=point.flops / (60 * point.parameters**0.9)) for point in ladder()]
    points = [evolve(point, loss=loss_of(point.parameters, point.tokens)) for point in points]
    found = predict(resampled(points, 5), 1e18, points)
    assert found.tokens * 60 * found.parameters**0.9 == pytest.approx(1e18, rel=1e-6)


def test_intervals_contain_the_estimate_and_one_run_varies_more():
    points = ladder(noise=0.01, seed=1)
    found = predict(resampled(points, 60), 1e19, points)
    for name in ("parameters", "tokens", "loss"):
        low, high = getattr(found, f"{name}_interval")
        assert low < getattr(found, name) < high
    assert found.run_interval[0] < found.loss_interval[0] < found.loss_interval[1] < found.run_interval[1]


def test_far_budgets_have_to_be_asked_for():
    points = ladder()
    of_all = resampled(points, 5)
    with pytest.raises(JobError, match=r"1e\+03 times the largest run.*--far"):
        predict(of_all, 1e21, points)
    assert predict(of_all, 1e21, points, far=True).loss < predict(of_all, 1e20, points).loss


def test_the_largest_budget_is_predicted_from_the_others():
    tried = held_out(Additive(), ladder(noise=0.005, seed=4), total=False, count=60)
    assert tried.points == 7
    assert tried.inside >= 5
    assert tried.largest_error < 0.03
    assert held_out(Additive(), ladder(budgets=2, sizes=6), total=False, count=10) is None


def test_parabolas_of_centred_sizes_have_the_laws_exponent():
    found = iso_flops(ladder())
    assert found.exponent == pytest.approx(EXPONENT, abs=5e-4)
    assert len(found.parabolas) == 6


def test_parabolas_whose_middle_drifts_are_biased_and_warn():
    points = ladder(drift=0.15)
    found = iso_flops(points)
    assert abs(found.exponent - EXPONENT) > 0.008
    assert any("the middle of its sizes" in text for text in found.warnings)
    assert fit(Additive(), points).values()["alpha"] == pytest.approx(LAW["alpha"], rel=1e-4)


def test_doubtful_curves_are_named():
    points = ladder()[7:14]
    warnings = iso_flops(points[:4] + points[5:]).warnings
    assert any("spaced unevenly" in text for text in warnings)
    ends = [evolve(point, loss=2 + 0.1 * number) for number, point in enumerate(points)]
    assert "no minimum" in iso_flops([evolve(p, loss=2 - 0.01 * (k - 3) ** 2) for k, p in enumerate(ends)]).warnings[0]
    assert (
        "outside of the sizes"
        in iso_flops([evolve(p, loss=2 + 0.1 * (k + 3) ** 2) for k, p in enumerate(ends)]).warnings[0]
    )
    assert math.isnan(iso_flops(points).exponent)
    assert not iso_flops(points[:3]).parabolas


def test_equal_flops_up_to_whole_steps_are_one_budget():
    jitter = np.random.default_rng(0).uniform(1, 1.05, 42)
    points = [evolve(point, flops=point.flops * factor) for point, factor in zip(ladder(), jitter, strict=True)]
    assert len(iso_flops(points).parabolas) == 6
