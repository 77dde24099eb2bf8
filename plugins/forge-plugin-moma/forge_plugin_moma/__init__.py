"""Mixture of modality-aware experts: a router for the feed-forward part `moe`."""

from forge_plugin_moma.moma import MoMa

__all__ = ["MoMa"]
