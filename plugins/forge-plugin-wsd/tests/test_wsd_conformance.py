"""`wsd` keeps the contracts of its kind."""

from __future__ import annotations

from forge_plugin_wsd import WSD
from forge_testing.distribution import check_distribution
from forge_testing.suites import SchedulerSuite


def test_the_distribution():
    check_distribution("forge-plugin-wsd")


class TestWSD(SchedulerSuite):
    component = WSD(warmup_steps=10)


class TestWSDOfFixedDecay(SchedulerSuite):
    component = WSD(decay_steps=20, shape="linear", min_ratio=0.1)
