"""`curves` keeps the contracts of its kind."""

from __future__ import annotations

from forge_plugin_runs.curves import Curves
from forge_testing.suites import LoggerSuite


class TestCurves(LoggerSuite):
    component = Curves()
