"""AdamW with moments in fewer bits: `adamw_8bit`, `adamw_float8`, `adamw_4bit` and `adamw_bf16` of kind `optimizer`."""

from forge_plugin_lowbit.lowbit import AdamW4bit, AdamW8bit, AdamWBF16, AdamWFloat8

__all__ = ["AdamW4bit", "AdamW8bit", "AdamWBF16", "AdamWFloat8"]
