"""What training does, in numbers: the hook `training_stats`, the plugin `noise_scale`."""

from forge_plugin_taps.stats.limits import Limit
from forge_plugin_taps.stats.noise_scale import NoiseScale
from forge_plugin_taps.stats.training_stats import TrainingStats

__all__ = ["Limit", "NoiseScale", "TrainingStats"]
