"""`ema` keeps the contracts of its kind."""

from __future__ import annotations

from forge_plugin_ema import EMA
from forge_testing.suites import HookSuite


class TestEMA(HookSuite):
    component = EMA(decay=0.9)
