"""Features of a frozen vision tower, kept on disk: type `features` of kind `plugin`."""

from forge_plugin_vision.features.features import Features

__all__ = ["Features"]
