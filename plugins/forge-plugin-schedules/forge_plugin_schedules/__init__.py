"""Schedules of the rate, of the global batch (`piecewise`, `ramp`), of the length of sequences (`length_schedule`)."""

from forge_plugin_schedules.batch_schedules import Piecewise, Ramp
from forge_plugin_schedules.length_schedule import LengthSchedule
from forge_plugin_schedules.schedules import Cosine, InverseSqrt, Linear, NoSchedule, Sequential

__all__ = ["Cosine", "InverseSqrt", "LengthSchedule", "Linear", "NoSchedule", "Piecewise", "Ramp", "Sequential"]
