"""Runs in Weights & Biases: logger `wandb`."""

from forge_plugin_wandb.weights_and_biases import Wandb

__all__ = ["Wandb"]
