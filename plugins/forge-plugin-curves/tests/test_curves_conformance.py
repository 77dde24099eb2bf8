"""`curves` keeps the contracts of its kind."""

from __future__ import annotations

from forge_core.testing.suites import LoggerSuite
from forge_plugin_curves import Curves


class TestCurves(LoggerSuite):
    component = Curves()
