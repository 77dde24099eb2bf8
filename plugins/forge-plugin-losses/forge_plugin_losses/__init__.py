"""Losses: types `chunked_cross_entropy` and `distillation` of kind `loss`."""

from forge_plugin_losses.losses import ChunkedCrossEntropy, Distillation

__all__ = ["ChunkedCrossEntropy", "Distillation"]
