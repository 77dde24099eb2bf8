"""torch.compile, block by block: stage `compile` of kind `parallel`; matrix products by oneDNN: subpackage `onednn`."""

from forge_plugin_compile.compile import Compile

__all__ = ["Compile"]
