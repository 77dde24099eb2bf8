"""Linear attention, for models whose attention is a component."""

from forge_plugin_linear_attention.gated_deltanet import GatedDeltaNet
from forge_plugin_linear_attention.kda import KDA
from forge_plugin_linear_attention.mamba2 import Mamba2
from forge_plugin_linear_attention.short_conv import ShortConv

__all__ = ["KDA", "GatedDeltaNet", "Mamba2", "ShortConv"]
