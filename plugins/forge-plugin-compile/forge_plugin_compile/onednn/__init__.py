"""float32 matrix products by oneDNN on AMD processors."""

from forge_plugin_compile.onednn.onednn import OneDNN

__all__ = ["OneDNN"]
