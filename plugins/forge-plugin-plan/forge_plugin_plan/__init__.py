"""Commands before a run: a first job, its samples, what a step takes on any number of ranks, checks of a machine."""

from forge_plugin_plan.calibration import Calibration
from forge_plugin_plan.doctor.cluster_check import ClusterCheck

__all__ = ["Calibration", "ClusterCheck"]
