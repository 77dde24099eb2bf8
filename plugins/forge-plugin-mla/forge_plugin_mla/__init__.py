"""Multi-head latent attention, for models whose attention is a component."""

from forge_plugin_mla.mla import DeepSeekSparseAttention, MultiHeadLatentAttention

__all__ = ["DeepSeekSparseAttention", "MultiHeadLatentAttention"]
