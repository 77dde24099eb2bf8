"""A picture of a run's curves: logger `curves`."""

from forge_plugin_curves.curves import Curves

__all__ = ["Curves"]
