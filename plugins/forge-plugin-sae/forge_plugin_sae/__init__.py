"""Sparse autoencoders on activations: sink, edit and evaluation `sae`, command `inside sae`, kind `sparsity`."""

from forge_plugin_sae.activations import L1, BatchTopK, JumpReLU, SparsityComponent, TopK
from forge_plugin_sae.edits import SAEEdit
from forge_plugin_sae.evaluation import LossRecovered
from forge_plugin_sae.sae import SAE

__all__ = ["L1", "SAE", "BatchTopK", "JumpReLU", "LossRecovered", "SAEEdit", "SparsityComponent", "TopK"]
