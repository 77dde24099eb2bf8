"""What the suite of schedules says of wrong ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
from attrs import frozen

from forge_core.contracts.components import SchedulerComponent
from forge_core.contracts.errors import Problem
from forge_testing.refusals import lacks
from forge_testing.suites import SchedulerSuite

pytestmark = pytest.mark.thorough


def component_of(make):
    """`make()` gives a schedule."""

    @frozen(kw_only=True)
    class Wrong(SchedulerComponent):
        def build(self, context):
            return make()

    return Wrong()


def counting():
    calls = iter(range(10**9))
    return lambda step, total: 1.0 / (1 + next(calls))


def remembering():
    """The length of the longest run that it was asked for."""
    seen = [0]

    def schedule(step, total):
        seen[0] = max(seen[0], total)
        return 1 - step / seen[0]

    return schedule


@frozen(kw_only=True)
class Short(SchedulerComponent):
    def problems(self, job, layout):
        if job.train.steps > 50:
            yield Problem("", "is for 50 steps at most")

    def build(self, context):
        return lambda step, total: 1.0


FINITE, PURE = "test_it_gives_a_finite_plain_number_for_every_step", "test_it_is_a_pure_function"


@pytest.mark.parametrize(
    ("check", "make", "told"),
    [
        (FINITE, lambda: lambda step, total: 1 / (total - 1), "schedule(step=0, total=1) fails: ZeroDivisionError"),
        (FINITE, lambda: lambda step, total: math.nan, "returns nan, which is not finite"),
        (FINITE, lambda: lambda step, total: np.float64(1.0), "of type float64; return a Python float"),
        (PURE, counting, "0.01, 1.0], depending on earlier calls"),
        ("test_one_schedule_serves_runs_of_other_lengths", remembering, "steps changed the values of one of 100"),
    ],
)
def test_what_is_wrong_is_told(refusal, check, make, told):
    assert told in refusal(SchedulerSuite, check, component_of(make))


def test_a_length_that_is_refused_is_told(refusal, tmp_path):
    said = refusal(SchedulerSuite, "test_a_job_refuses_no_run_of_the_stated_length", Short())
    assert not lacks(said, "total_steps = 100", "50 steps")
