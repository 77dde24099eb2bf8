"""Runs as distributed tasks of dstack: type `dstack` of kind `cluster`."""

from forge_plugin_dstack.cluster import DstackCluster

__all__ = ["DstackCluster"]
