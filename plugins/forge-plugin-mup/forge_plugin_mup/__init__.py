"""Hyperparameter transfer: type `mup` of kind `plugin`."""

from forge_plugin_mup.mup import MuP

__all__ = ["MuP"]
