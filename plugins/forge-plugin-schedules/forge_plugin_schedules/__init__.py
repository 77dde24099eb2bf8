"""Learning-rate schedules: types `cosine`, `linear`, `inverse_sqrt`, `sequential` and `none` of kind `scheduler`."""

from forge_plugin_schedules.cosine import Cosine
from forge_plugin_schedules.inverse_sqrt import InverseSqrt
from forge_plugin_schedules.linear import Linear
from forge_plugin_schedules.none import NoSchedule
from forge_plugin_schedules.sequential import Sequential

__all__ = ["Cosine", "InverseSqrt", "Linear", "NoSchedule", "Sequential"]
