"""Linear attention, for models whose attention is a component."""

from forge_plugin_linear_attention.gated_deltanet import GatedDeltaNet

__all__ = ["GatedDeltaNet"]
