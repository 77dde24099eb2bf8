"""Commands that start runs: on SLURM and other clusters, and on one machine, again when they end early."""

from forge_plugin_launch.clusters import Cluster, Status, SubmittedRun

__all__ = ["Cluster", "Status", "SubmittedRun"]
