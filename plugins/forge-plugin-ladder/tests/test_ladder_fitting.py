"""Fits against known laws and an independent search; what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from attrs import evolve
from known_ladders import LAW, ladder, loss_of
from scipy.optimize import minimize

from forge_core.contracts.errors import JobError
from forge_plugin_ladder import Additive, Point, Repeated
from forge_plugin_ladder.fitting import fit


def test_five_values_are_found_without_noise():
    assert fit(Additive(), ladder()).values() == pytest.approx(LAW, rel=1e-6)


def test_a_noisy_fit_is_the_least_value_of_hubers_loss_of_logs():
    points = ladder(noise=0.01, seed=3)
    found = fit(Additive(), points)
    n, d, losses = (np.array([getattr(point, name) for point in points]) for name in ("parameters", "tokens", "loss"))

    def objective(x):
        residual = np.abs(np.log(np.exp(x[0]) + np.exp(x[1]) * n ** -x[3] + np.exp(x[2]) * d ** -x[4]) - np.log(losses))
        z = residual / found.threshold
        return 0.5 * found.threshold**2 * np.where(z <= 1, z**2, 2 * z - 1).sum()

    ours = np.array([*np.log(found.coefficients), *found.exponents])
    start = ours + np.array([0.05, 0.5, -0.5, 0.05, -0.05])
    other = minimize(objective, start, method="Nelder-Mead", options={"maxiter": 9000, "maxfev": 9000, "fatol": 1e-13})
    assert found.cost == pytest.approx(objective(ours), rel=1e-9)
    assert objective(ours) <= other.fun * (1 + 1e-6)


def test_one_run_that_went_wrong_hardly_moves_the_fit():
    points = ladder(noise=0.002, seed=1)
    spoilt = [evolve(points[10], loss=points[10].loss * 1.1), *points[:10], *points[11:]]
    before, after = fit(Additive(), points).values(), fit(Additive(), spoilt).values()
    assert after["alpha"] == pytest.approx(before["alpha"], rel=0.02)


def test_repetition_has_its_own_value():
    # Muennighoff et al. 2023 find 15.4
    points = []
    for point in ladder(budgets=4, sizes=6):
        for unique in (point.tokens / 8, point.tokens / 2, point.tokens * 2):
            worth = min(unique, point.tokens)
            worth *= 1 + 15.4 * (1 - np.exp(-(point.tokens / worth - 1) / 15.4))
            points.append(evolve(point, unique_tokens=unique, loss=loss_of(point.parameters, worth)))
    values = fit(Repeated(), points).values()
    assert values == pytest.approx(LAW | {"r": 15.4}, rel=1e-4)
    with pytest.raises(JobError, match="counts as fresh ones"):
        fit(Additive(), points)


def test_all_parameters_are_another_law():
    values = fit(Additive(), ladder(), total=True).values()
    assert values["A"] == pytest.approx(LAW["A"] * 1.1 ** LAW["alpha"], rel=1e-6)


def bent(n, d):
    return loss_of(n, d) * np.exp(0.004 * (np.log(d / 1e8)) ** 2)


def flat(n, d):
    return 2.0 + 0 * n


def steep(n, d):
    return 1 + (n / 1e6) ** -3.0 + (d / 1e8) ** -0.3


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (ladder(noise=0.001, loss=bent), "bends with"),
        (ladder(noise=1e-3, loss=flat), "bound|no part"),
        (ladder(loss=steep), "alpha is at the bound"),
        (ladder()[:6], "6 of 6 points have a loss; a fit needs 7"),
        ([evolve(point, held_out=number > 3) for number, point in enumerate(ladder())], "has a training loss"),
    ],
    ids=["trend", "nothing to fit", "bound", "too few", "mixed losses"],
)
def test_what_says_nothing_is_refused(points, message):
    with pytest.raises(JobError, match=message):
        fit(Additive(), points)


def test_failed_runs_are_left_out():
    points = ladder()
    broken = Point(run="broken", parameters=1e6, parameters_total=1e6, tokens=1e8, flops=6e14, failed="diverged")
    assert fit(Additive(), [*points, broken]).values() == fit(Additive(), points).values()
