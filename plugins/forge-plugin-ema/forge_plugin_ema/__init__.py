"""An exponential moving average of the weights: type `ema` of kind `plugin`."""

from forge_plugin_ema.ema import EMA

__all__ = ["EMA"]
