"""Low-rank adapters: type `lora` of kind `plugin`, and type `peft` of kind `load`."""

from forge_plugin_lora.lora import LoRA
from forge_plugin_lora.peft_load import PEFTAdapter

__all__ = ["LoRA", "PEFTAdapter"]
