"""`trackio` keeps the contracts of its kind."""

from __future__ import annotations

from forge_plugin_trackio import Trackio
from forge_testing.suites import LoggerSuite


class TestTrackio(LoggerSuite):
    component = Trackio()
