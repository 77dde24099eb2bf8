"""`curves` keeps the contracts of its kind."""

from __future__ import annotations

from forge_plugin_curves import Curves
from forge_testing.distribution import check_distribution
from forge_testing.suites import LoggerSuite


def test_the_distribution():
    check_distribution("forge-plugin-curves")


class TestCurves(LoggerSuite):
    component = Curves()
