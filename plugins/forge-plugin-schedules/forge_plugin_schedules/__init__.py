"""Decaying learning-rate schedules: types `cosine` and `linear` of kind `scheduler`."""

from forge_plugin_schedules.cosine import Cosine
from forge_plugin_schedules.linear import Linear

__all__ = ["Cosine", "Linear"]
