"""Staged freezing: type `freeze` of kind `plugin`."""

from forge_plugin_freeze.freeze import Freeze, Stage

__all__ = ["Freeze", "Stage"]
