"""Runs on Kubernetes by Kubeflow Trainer: the type `kubeflow` of kind `cluster`."""

from forge_plugin_kubeflow.cluster import KubeflowCluster

__all__ = ["KubeflowCluster"]
