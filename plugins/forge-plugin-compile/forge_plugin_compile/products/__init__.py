"""Matrix products on a CPU by what is fastest there and as exact."""

from forge_plugin_compile.products.plugin import CPUProducts

__all__ = ["CPUProducts"]
