"""`wsd` against closed forms, and its laws."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_core.contracts.layout import Layout
from forge_plugin_wsd import WSD
from forge_testing.refusals import at, check_problems


def values(component, total):
    schedule = component.build(None)
    return [schedule(step, total) for step in range(total)]


@pytest.mark.parametrize(
    ("shape", "decay"),
    [
        ("linear", [1.0, 0.75, 0.5, 0.25]),
        ("sqrt", [1 - math.sqrt(p) for p in (0, 0.25, 0.5, 0.75)]),
        ("cosine", [0.5 * (1 + math.cos(math.pi * p)) for p in (0, 0.25, 0.5, 0.75)]),
    ],
)
def test_the_three_phases(shape, decay):
    found = values(WSD(warmup_steps=2, decay_steps=4, shape=shape), 10)
    assert found == pytest.approx([0.5, 1, 1, 1, 1, 1, *decay])


def test_the_floor():
    assert values(WSD(decay_steps=2, shape="linear", min_ratio=0.1), 4) == pytest.approx([1, 1, 1, 0.55])


def test_the_decay_is_a_share_of_the_run_unless_given():
    assert values(WSD(decay_fraction=0.5, shape="linear"), 8)[4:] == pytest.approx([1, 0.75, 0.5, 0.25])
    assert values(WSD(decay_fraction=0), 5) == [1] * 5


@given(
    st.integers(0, 30),
    st.integers(0, 30),
    st.floats(0, 1),
    st.sampled_from(["linear", "cosine", "sqrt"]),
    st.integers(1, 40),
)
def test_laws(warmup_steps, decay_steps, min_ratio, shape, stable):
    component = WSD(
        warmup_steps=warmup_steps, decay_steps=decay_steps, decay_fraction=0, shape=shape, min_ratio=min_ratio
    )
    found = values(component, warmup_steps + stable + decay_steps)
    rise, flat, fall = found[:warmup_steps], found[warmup_steps : warmup_steps + stable], found[warmup_steps + stable :]
    assert rise == sorted(rise)
    assert all(value > 0 for value in rise)
    assert flat == [1.0] * stable
    assert fall == sorted(fall, reverse=True)
    assert all(min_ratio - 1e-12 <= value <= 1 for value in fall)


def test_overlapping_phases_are_a_problem(make_job):
    job = make_job(steps=10)
    overlap = at("decay_steps", "warm-up (6)", "decay (5)", "10 updates")
    check_problems(WSD(warmup_steps=6, decay_steps=5).problems(job, Layout()), overlap)
    [longest] = WSD(warmup_steps=10, decay_steps=5).problems(job, Layout())  # no step is left to decay in
    assert (longest.path, longest.fits) == ("warmup_steps", 6)
    assert [p.path for p in WSD(warmup_steps=9).problems(job, Layout())] == ["decay_fraction"]
    assert list(WSD(warmup_steps=2).problems(job, Layout())) == []


def test_two_lengths_of_the_decay_are_a_problem(make_job):
    found = WSD(decay_steps=3, decay_fraction=0.5).problems(make_job(steps=10), Layout())
    check_problems(found, at("decay_fraction", "decay_steps = 3"))
