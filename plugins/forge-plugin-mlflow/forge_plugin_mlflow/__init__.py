"""Runs in MLflow: logger `mlflow`."""

from forge_plugin_mlflow.mlflow_component import MLflow

__all__ = ["MLflow"]
