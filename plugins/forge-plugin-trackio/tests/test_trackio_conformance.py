"""`trackio` keeps the contracts of its kind."""

from __future__ import annotations

from forge_plugin_trackio import Trackio
from forge_testing.distribution import check_distribution
from forge_testing.suites import LoggerSuite


def test_the_distribution():
    check_distribution("forge-plugin-trackio")


class TestTrackio(LoggerSuite):
    component = Trackio()
