"""`spikes` keeps the contracts of its kind."""

from __future__ import annotations

from forge_plugin_spikes import Spikes
from forge_testing.distribution import check_distribution
from forge_testing.suites import HookSuite


def test_the_distribution():
    check_distribution("forge-plugin-spikes")


class TestQuiet(HookSuite):
    """Nothing is a spike in six clean steps."""

    component = Spikes()
