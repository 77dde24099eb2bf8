"""Losses: `chunked_cross_entropy`."""

from forge_plugin_losses.chunked_cross_entropy import ChunkedCrossEntropy

__all__ = ["ChunkedCrossEntropy"]
