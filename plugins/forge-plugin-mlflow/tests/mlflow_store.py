"""A SQLite store of MLflow for all tests, and clients of stores."""

from __future__ import annotations

import functools
import tempfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient


@functools.cache
def database() -> str:
    """Address of a database whose tables are there."""
    uri = f"sqlite:///{tempfile.mkdtemp(prefix='mlflow-')}/mlflow.db"
    client_of(uri).search_experiments(max_results=1)
    return uri


def client_of(uri: str) -> MlflowClient:
    """MLflow's own client of a store."""
    # Imported here, since pytest imports every test file in every process, and this takes more than a second
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri)
