"""Reflected exponential: type `rex` of kind `scheduler`."""

from forge_plugin_rex.rex import REX

__all__ = ["REX"]
