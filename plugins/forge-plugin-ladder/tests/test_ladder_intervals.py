"""Intervals cover the truth as often as they say, and runs are resampled, not points."""

from __future__ import annotations

import numpy as np
import pytest
from attrs import evolve
from known_ladders import EXPONENT, ladder, loss_of

from forge_core.contracts.errors import JobError
from forge_plugin_ladder import Additive, Sizes
from forge_plugin_ladder.fitting import fit
from forge_plugin_ladder.intervals import resample

FAR = 1e20
"""100 times the largest budget."""


def exponents_of(resampled):
    return resampled.exponents[:, 1] / resampled.exponents.sum(1)


@pytest.mark.thorough
def test_nine_intervals_of_ten_contain_the_truth():
    n = np.array([np.sqrt(FAR / 120)])
    size = Sizes(parameters=n, tokens=FAR / 6 / n, unique_tokens=np.array([np.inf]))
    inside, draws = np.zeros(2), 25
    for seed in range(draws):
        points = ladder(0.005, seed)
        found = fit(Additive(), points)
        resampled = resample(found, points, count=60)
        estimate = found.exponents[1] / found.exponents.sum()
        low, high = resampled.interval(estimate, exponents_of(resampled))
        inside[0] += low <= EXPONENT <= high
        losses = np.array([each.loss(size)[0] for each in resampled.each()])
        low, high = resampled.interval(found.loss(size)[0], losses)
        inside[1] += low <= loss_of(n, FAR / 6 / n)[0] <= high
    # 0.9 with a standard deviation of 0.06; docs/log.md has 200 draws of three strengths of noise
    assert np.all(np.abs(inside / draws - 0.9) <= 0.1), inside / draws


def width(points):
    found = fit(Additive(), points)
    resampled = resample(found, points, count=50)
    return np.std(exponents_of(resampled)) * resampled.widened


def test_more_points_of_the_same_runs_are_no_more_runs():
    points = ladder(noise=0.005, seed=5)
    as_runs = [evolve(point, run=f"{point.run}-{number}") for point in points for number in range(3)]
    # The first of three is the trunk of the others
    branches = [evolve(each, trunk="" if each.run[-1] == "0" else f"{each.run[:-1]}0") for each in as_runs]
    assert width(branches) == pytest.approx(width(points), rel=0.1)
    assert width(as_runs) < 0.8 * width(points)


def test_too_few_runs_have_no_interval():
    points = [evolve(point, run=str(number % 6)) for number, point in enumerate(ladder(noise=0.005))]
    with pytest.raises(JobError, match="6 independent runs have a loss, and an interval needs 7"):
        resample(fit(Additive(), points), points)


def test_draws_are_the_same_each_time():
    points = ladder(noise=0.005, seed=2)
    found = fit(Additive(), points)
    first, second = (resample(found, points, count=8) for _ in range(2))
    assert np.array_equal(first.exponents, second.exponents)
    assert not np.array_equal(first.exponents, resample(found, points, count=8, seed=1).exponents)
