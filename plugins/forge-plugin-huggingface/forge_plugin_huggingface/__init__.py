"""Hugging Face for Forge: dataset `huggingface` and tokenizer `auto`.

From a name to tokens: `source` finds the data, `encoding` turns its rows into ids, and either `tokens` writes them into
cached token files, or `stream` reads them lane by lane during training.
"""

from forge_plugin_huggingface.auto import Auto
from forge_plugin_huggingface.dataset import HuggingFace

__all__ = ["Auto", "HuggingFace"]
