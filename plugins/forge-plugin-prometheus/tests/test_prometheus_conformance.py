"""`prometheus` keeps the contracts of its kind."""

from __future__ import annotations

from forge_plugin_prometheus import Prometheus
from forge_testing.distribution import check_distribution
from forge_testing.suites import LoggerSuite


def test_the_distribution():
    check_distribution("forge-plugin-prometheus")


class TestPrometheus(LoggerSuite):
    component = Prometheus(port=0)
