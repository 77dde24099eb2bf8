"""Where the time of a run goes: hooks `goodput`, `interval` and `disk`, and the command `profile goodput`."""

from forge_plugin_resilience.goodput.disk import Disk
from forge_plugin_resilience.goodput.goodput import Goodput
from forge_plugin_resilience.goodput.interval import Interval

__all__ = ["Disk", "Goodput", "Interval"]
