"""`ema` keeps the contracts of its kind."""

from __future__ import annotations

from forge_plugin_ema import EMA
from forge_testing.distribution import check_distribution
from forge_testing.suites import HookSuite


def test_the_distribution():
    check_distribution("forge-plugin-ema")


class TestEMA(HookSuite):
    component = EMA(decay=0.9)
