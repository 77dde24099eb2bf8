"""`cosine` and `linear` keep the contracts of their kind."""

from __future__ import annotations

from forge_core.testing.distribution import check_distribution
from forge_core.testing.suites import SchedulerSuite
from forge_plugin_schedules import Cosine, Linear


def test_the_distribution():
    check_distribution("forge-plugin-schedules")


class TestCosine(SchedulerSuite):
    component = Cosine(warmup_steps=10, min_ratio=0.1)


class TestCosineOfItsOwnLength(SchedulerSuite):
    component = Cosine(decay_steps=50)


class TestLinear(SchedulerSuite):
    component = Linear(warmup_steps=3)
