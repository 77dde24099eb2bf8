"""torch.compile, block by block: stage `compile` of kind `parallel`; subpackage `products`: products on a CPU."""

from forge_plugin_compile.compile import Compile

__all__ = ["Compile"]
