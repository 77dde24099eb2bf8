"""`wsd` keeps the contracts of its kind."""

from __future__ import annotations

from forge_plugin_wsd import WSD
from forge_testing.suites import SchedulerSuite


class TestWSD(SchedulerSuite):
    component = WSD(warmup_steps=10)


class TestWSDOfFixedDecay(SchedulerSuite):
    component = WSD(decay_steps=20, shape="linear", min_ratio=0.1)
