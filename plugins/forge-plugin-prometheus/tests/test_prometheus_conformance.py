"""`prometheus` keeps the contracts of its kind."""

from __future__ import annotations

from forge_plugin_prometheus import Prometheus
from forge_testing.suites import LoggerSuite


class TestPrometheus(LoggerSuite):
    component = Prometheus(port=0)
