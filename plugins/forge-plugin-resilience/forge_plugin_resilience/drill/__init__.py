"""Fault injection: command `doctor drill`, and the plugin by which it acts inside the ranks of a run."""

from forge_plugin_resilience.drill.plugin import Drill

__all__ = ["Drill"]
