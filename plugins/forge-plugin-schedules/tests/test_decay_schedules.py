"""`cosine` and `linear` against closed forms, and the laws that every schedule keeps."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_core.contracts.layout import Layout
from forge_plugin_schedules import Cosine, Linear


def values(component, total):
    schedule = component.build(None)
    return [schedule(step, total) for step in range(total)]


def test_linear_is_a_straight_line_to_the_floor():
    assert values(Linear(min_ratio=0.2), 4) == pytest.approx([1.0, 0.8, 0.6, 0.4])


def test_cosine_is_half_a_cosine():
    expected = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / 10)) for step in range(10)]
    assert values(Cosine(min_ratio=0.1), 10) == pytest.approx(expected)


@pytest.mark.parametrize("kind", [Cosine, Linear])
def test_warmup_comes_first_and_its_first_update_is_not_zero(kind):
    assert values(kind(warmup_steps=4), 8)[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


@pytest.mark.parametrize("kind", [Cosine, Linear])
def test_after_its_steps_the_rate_stays_at_the_floor(kind):
    assert values(kind(decay_steps=5, min_ratio=0.3), 9)[5:] == pytest.approx([0.3] * 4)


@given(st.sampled_from([Cosine, Linear]), st.integers(0, 50), st.integers(0, 50), st.floats(0, 1), st.integers(0, 100))
def test_laws(kind, warmup_steps, decay_steps, min_ratio, more):
    component = kind(warmup_steps=warmup_steps, decay_steps=decay_steps, min_ratio=min_ratio)
    total = warmup_steps + decay_steps + more + 1
    found = values(component, total)
    rise, fall = found[:warmup_steps], found[warmup_steps:]
    assert all(0 <= value <= 1 for value in found)
    assert all(value > 0 for value in rise)
    assert rise == sorted(rise)
    assert fall == sorted(fall, reverse=True)
    assert all(value >= min_ratio - 1e-12 for value in fall)
    assert fall[0] == pytest.approx(1)


def test_a_decay_longer_than_the_run_is_a_problem(make_job):
    job = make_job(steps=10)
    found = [str(p) for p in Cosine(warmup_steps=5, decay_steps=6).problems(job, Layout())]
    expected = (
        "decay_steps: warmup_steps 5 + decay_steps 6 = 11 updates are more than train.steps 10; 0 decays until the end"
    )
    assert found == [expected]
    assert [p.path for p in Linear(warmup_steps=11).problems(job, Layout())] == ["warmup_steps"]
