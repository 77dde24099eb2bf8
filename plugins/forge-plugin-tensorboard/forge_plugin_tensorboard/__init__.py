"""Metrics for TensorBoard: logger `tensorboard`."""

from forge_plugin_tensorboard.tensorboard import TensorBoard

__all__ = ["TensorBoard"]
