"""Warmup, stable, decay: type `wsd` of kind `scheduler`."""

from forge_plugin_wsd.wsd import WSD

__all__ = ["WSD"]
