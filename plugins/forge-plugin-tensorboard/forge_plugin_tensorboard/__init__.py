"""Metrics for TensorBoard: type `tensorboard` of kind `logger`."""

from forge_plugin_tensorboard.tensorboard import TensorBoard

__all__ = ["TensorBoard"]
