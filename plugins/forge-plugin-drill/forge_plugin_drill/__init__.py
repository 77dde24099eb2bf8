"""The fire drill: command `drill`, and the plugin by which it reaches into the ranks of a run."""

from forge_plugin_drill.plugin import Drill

__all__ = ["Drill"]
