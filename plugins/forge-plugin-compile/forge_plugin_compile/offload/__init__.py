"""Activations in the memory of the host until the backward pass: stage `activation_offload` of kind `parallel`."""

from forge_plugin_compile.offload.activation_offload import ActivationOffload

__all__ = ["ActivationOffload"]
