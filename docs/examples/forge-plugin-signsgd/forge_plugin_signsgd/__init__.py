"""signSGD for Forge."""

from forge_plugin_signsgd.signsgd import SignSGD

__all__ = ["SignSGD"]
