"""Training in few bits: optimizers `adamw_8bit`, `adamw_float8`, `adamw_4bit`, `adamw_bf16`; stage `float8`."""

from forge_plugin_lowbit.lowbit import AdamW4bit, AdamW8bit, AdamWBF16, AdamWFloat8

__all__ = ["AdamW4bit", "AdamW8bit", "AdamWBF16", "AdamWFloat8"]
