"""Losses: types `chunked_cross_entropy` and `distillation` of kind `loss`."""

from forge_plugin_losses.chunked_cross_entropy import ChunkedCrossEntropy
from forge_plugin_losses.distillation import Distillation

__all__ = ["ChunkedCrossEntropy", "Distillation"]
