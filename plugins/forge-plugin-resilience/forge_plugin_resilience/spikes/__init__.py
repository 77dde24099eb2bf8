"""Spikes of loss and gradient norm, skipped or rolled back: type `spikes` of kind `hook`."""

from forge_plugin_resilience.spikes.score import Score, robust_score
from forge_plugin_resilience.spikes.spikes import Spikes

__all__ = ["Score", "Spikes", "robust_score"]
