"""Runs as managed jobs of SkyPilot: type `sky` of kind `cluster`."""

from forge_plugin_skypilot.cluster import SkyCluster

__all__ = ["SkyCluster"]
