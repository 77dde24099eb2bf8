"""Checkpoints: command `checkpoints`, table `[checkpoint.load]`, and the storages `tiered` and `objects`."""

from forge_plugin_checkpoints.parts import Parts

__all__ = ["Parts"]
