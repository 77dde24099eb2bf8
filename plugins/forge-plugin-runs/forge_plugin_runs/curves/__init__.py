"""A picture of a run's curves: logger `curves`."""

from forge_plugin_runs.curves.curves import Curves

__all__ = ["Curves"]
