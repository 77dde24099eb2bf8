"""Sign of an interpolated momentum: type `lion` of kind `optimizer`."""

from forge_plugin_lion.lion import Lion

__all__ = ["Lion"]
