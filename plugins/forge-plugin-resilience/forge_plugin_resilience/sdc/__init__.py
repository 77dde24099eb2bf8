"""Silent data corruption: plugin `sdc`, hook `replicas`, command `replay`."""

from forge_plugin_resilience.sdc.faults import CorruptionError, Fault
from forge_plugin_resilience.sdc.replicas import Replicas
from forge_plugin_resilience.sdc.sdc import SDC

__all__ = ["SDC", "CorruptionError", "Fault", "Replicas"]
