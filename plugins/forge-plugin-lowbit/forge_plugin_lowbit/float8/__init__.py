"""Matrix products in float8 during training: stage `float8` of kind `parallel`."""

from forge_plugin_lowbit.float8.float8 import Float8

__all__ = ["Float8"]
