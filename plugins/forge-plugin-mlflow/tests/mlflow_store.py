"""A SQLite store of MLflow for all tests."""

from __future__ import annotations

import functools
import tempfile

from mlflow.tracking import MlflowClient


@functools.cache
def database() -> str:
    """Address of a database whose tables are there."""
    uri = f"sqlite:///{tempfile.mkdtemp(prefix='mlflow-')}/mlflow.db"
    MlflowClient(tracking_uri=uri).search_experiments(max_results=1)
    return uri
