"""Documents for training, filtered, deduplicated and decontaminated by datatrove, and Forge's tokens as its step."""

from forge_plugin_datatrove.tokens import ForgeJoin, ForgeTokens

__all__ = ["ForgeJoin", "ForgeTokens"]
