"""Where the time of a run goes: hooks `goodput`, `interval` and `disk`, and the command `goodput`."""

from forge_plugin_goodput.disk import Disk
from forge_plugin_goodput.goodput import Goodput
from forge_plugin_goodput.interval import Interval

__all__ = ["Disk", "Goodput", "Interval"]
