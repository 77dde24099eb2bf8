"""`curves` keeps the contracts of its kind."""

from __future__ import annotations

from forge_core.testing.distribution import check_distribution
from forge_core.testing.suites import LoggerSuite
from forge_plugin_curves import Curves


def test_the_distribution():
    check_distribution("forge-plugin-curves")


class TestCurves(LoggerSuite):
    component = Curves()
