"""The command `forge-run checkpoints` (list, verify, compare, export, delete), and `[checkpoint.load]`."""

from forge_plugin_checkpoints.parts import Parts

__all__ = ["Parts"]
