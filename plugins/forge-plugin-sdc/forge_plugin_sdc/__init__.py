"""Silent data corruption: plugin `sdc`, hook `replicas`, command `replay`."""

from forge_plugin_sdc.faults import CorruptionError, Fault
from forge_plugin_sdc.replicas import Replicas
from forge_plugin_sdc.sdc import SDC

__all__ = ["SDC", "CorruptionError", "Fault", "Replicas"]
