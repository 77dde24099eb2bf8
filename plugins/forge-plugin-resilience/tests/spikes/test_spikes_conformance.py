"""`spikes` keeps the contracts of its kind."""

from __future__ import annotations

from forge_plugin_resilience.spikes import Spikes
from forge_testing.suites import HookSuite


class TestQuiet(HookSuite):
    """Nothing is a spike in six clean steps."""

    component = Spikes()
    # Losses of each step, and whether any rank asks to leave the update out
    waits = {"spikes.py": 5, "step.py": 5}
