"""`ema` keeps the contracts of its kind."""

from __future__ import annotations

from forge_core.testing.distribution import check_distribution
from forge_core.testing.suites import HookSuite
from forge_plugin_ema import EMA


def test_the_distribution():
    check_distribution("forge-plugin-ema")


class TestEMA(HookSuite):
    component = EMA(decay=0.9)
