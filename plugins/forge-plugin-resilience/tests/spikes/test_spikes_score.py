"""The robust score, against numpy and its own statistics."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_plugin_resilience.spikes import robust_score
from forge_plugin_resilience.spikes.score import LEAST_DEVIATION, MAD_TO_DEVIATION

LOGARITHMS = st.lists(st.floats(-20, 20), min_size=1, max_size=40)


@given(LOGARITHMS, st.floats(1e-6, 1e6))
def test_it_is_the_closed_form_by_numpy(logarithms, value):
    center = np.median(logarithms)
    deviation = np.median(np.abs(np.asarray(logarithms) - center)) / NormalDist().inv_cdf(0.75)
    score = robust_score(value, logarithms)
    assert score.median == pytest.approx(np.exp(center), rel=1e-12)
    assert score.z == pytest.approx((np.log(value) - center) / max(deviation, LEAST_DEVIATION), rel=1e-4, abs=1e-9)


def test_the_factor_is_that_of_the_normal_distribution():
    assert pytest.approx(1 / NormalDist().inv_cdf(0.75), abs=5e-5) == MAD_TO_DEVIATION


@given(st.lists(st.floats(-1, 1), min_size=11, max_size=41), st.lists(st.floats(50, 100), max_size=5))
def test_some_spikes_in_the_window_do_not_hide_another(usual, spikes):
    """As many as under a third leave the score of a large value large, where a mean and a deviation lose it."""
    assert robust_score(math.exp(60), [*usual, *spikes]).z > 6


def test_equal_values_leave_room_for_rounding_only():
    same = [0.0] * 32
    assert robust_score(1 + 1e-6, same).z < 0.01
    assert robust_score(1.01, same).z == pytest.approx(math.log(1.01) / LEAST_DEVIATION)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_scores_infinitely(value):
    assert robust_score(value, [0.0, 1.0]).z == math.inf
    assert robust_score(value, []).z == math.inf


def test_a_clean_run_of_1000_values_has_no_false_alarm():
    """Log-normal noise around a falling trend, as of a loss; the documented rate is of a million values."""
    random = np.random.default_rng(0)
    alarms = 0
    for _ in range(5):
        logarithms = list(0.1 * random.normal(size=1000) - np.log1p(np.arange(1000) / 100))
        scores = [
            robust_score(math.exp(x), logarithms[max(0, i - 128) : i]) for i, x in enumerate(logarithms) if i > 31
        ]
        alarms += sum(score.z > 6 for score in scores)
    assert alarms == 0
