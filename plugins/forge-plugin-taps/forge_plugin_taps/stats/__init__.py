"""What training does, in numbers: the hook `training_stats`."""

from forge_plugin_taps.stats.limits import Limit
from forge_plugin_taps.stats.training_stats import TrainingStats

__all__ = ["Limit", "TrainingStats"]
