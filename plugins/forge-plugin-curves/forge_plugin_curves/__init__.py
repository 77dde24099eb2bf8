"""A picture of a run: type `curves` of kind `logger`."""

from forge_plugin_curves.curves import Curves

__all__ = ["Curves"]
