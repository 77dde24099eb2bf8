"""Groups of ranks that outlive each other: type `torchft` of kind `parallel`, hooks `diloco` and `local_sgd`."""

from forge_plugin_torchft.outer import DiLoCo, LocalSGD
from forge_plugin_torchft.stage import TorchFT

__all__ = ["DiLoCo", "LocalSGD", "TorchFT"]
