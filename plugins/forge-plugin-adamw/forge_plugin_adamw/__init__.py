"""Adam with decoupled weight decay: type `adamw` of kind `optimizer`."""

from forge_plugin_adamw.adamw import AdamW

__all__ = ["AdamW"]
