"""Low-rank adapters: type `lora` of kind `plugin`."""

from forge_plugin_lora.lora import LoRA

__all__ = ["LoRA"]
