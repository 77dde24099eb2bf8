"""The core's schedule, and the two phases that every schedule is made of."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_core.schedules import Constant, warmup
from forge_kit.optim.schedules import progress
from forge_testing.refusals import at, check_problems

steps = st.integers(0, 10_000)
lengths = st.integers(0, 10_000)


def test_constant_is_one_from_the_first_update() -> None:
    schedule = Constant().build(SimpleNamespace())
    assert [schedule(step, 3) for step in range(3)] == [1.0, 1.0, 1.0]


def test_constant_warms_up_in_equal_parts_and_never_starts_at_zero() -> None:
    schedule = Constant(warmup_steps=4).build(SimpleNamespace())
    assert [schedule(step, 6) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@given(steps, lengths)
def test_warmup_stays_in_the_unit_interval_and_grows(step: int, length: int) -> None:
    assert 0 < warmup(step, length) <= warmup(step + 1, length) <= 1
    assert warmup(step, length) == 1 or step < length - 1


@given(steps, steps, lengths)
def test_progress_goes_from_zero_at_the_start_to_one_after_the_phase(step: int, start: int, length: int) -> None:
    assert 0 <= progress(step, start, length) <= progress(step + 1, start, length) <= 1
    assert progress(start, start, length) == 0
    assert progress(start + max(length, 1), start, length) == 1


def test_the_last_update_of_a_phase_is_one_part_short_of_its_end() -> None:
    assert [progress(step, 2, 4) for step in range(8)] == [0, 0, 0, 0.25, 0.5, 0.75, 1, 1]


def test_a_warmup_longer_than_the_run_is_a_problem_that_names_both_numbers() -> None:
    job = SimpleNamespace(train=SimpleNamespace(steps=10))
    problems = Constant(warmup_steps=11).problems(job, SimpleNamespace())
    check_problems(problems, at("warmup_steps", 11, "train.steps", 10))
    assert not list(Constant(warmup_steps=10).problems(job, SimpleNamespace()))


def test_a_negative_warmup_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="warmup_steps"):
        Constant(warmup_steps=-1)
