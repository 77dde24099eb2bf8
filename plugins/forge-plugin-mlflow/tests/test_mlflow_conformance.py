"""`mlflow` keeps the contracts of its kind."""

from __future__ import annotations

from mlflow_store import database

from forge_plugin_mlflow import MLflow
from forge_testing.suites import LoggerSuite


class TestMLflow(LoggerSuite):
    def make(self, folder):
        return MLflow(tracking_uri=database())
