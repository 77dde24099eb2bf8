"""Fusion `cross_attention`: layers of a language model look at the features of images."""

from forge_plugin_cross_attention.cross_attention import CrossAttention

__all__ = ["CrossAttention"]
