"""Learning-rate schedules: types `cosine`, `linear`, `inverse_sqrt`, `sequential` and `none` of kind `scheduler`."""

from forge_plugin_schedules.schedules import Cosine, InverseSqrt, Linear, NoSchedule, Sequential

__all__ = ["Cosine", "InverseSqrt", "Linear", "NoSchedule", "Sequential"]
