"""`rex` keeps the contracts of its kind."""

from __future__ import annotations

from forge_plugin_rex import REX
from forge_testing.suites import SchedulerSuite


class TestREX(SchedulerSuite):
    component = REX(warmup_steps=5)


class TestPolynomialREX(SchedulerSuite):
    component = REX(power=0.5, min_ratio=0.1)
