"""Sparse autoencoders and transcoders on a run's activations: sink `sae`, kind `sparsity`, command `sae`."""

from forge_plugin_sae.activations import L1, BatchTopK, JumpReLU, SparsityComponent, TopK
from forge_plugin_sae.sae import SAE

__all__ = ["L1", "SAE", "BatchTopK", "JumpReLU", "SparsityComponent", "TopK"]
