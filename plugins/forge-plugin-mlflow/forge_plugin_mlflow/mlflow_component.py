"""The component `mlflow`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge, gt

from forge_core.contracts.components import FilePath
from forge_core.contracts.errors import Problem
from forge_kit.tools.tracking import TrackerComponent

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.runtime import Logger
    from forge_core.job import Job


@frozen(kw_only=True)
class MLflow(TrackerComponent):
    """Shows the run in MLflow: numbers by step, files, the resolved job as parameters and as a file.

    A thread sends lines in batches; while the server is unreachable, training continues and the lines wait. A run that
    continues is the same run there, and its unsent lines are sent then. MLflow cannot forget: a step that is made again
    after a crash has two values, of which the later one counts as the newest.
    """

    tracking_uri: FilePath = ""
    """Server (`https://…`), database (`sqlite:///…`), or `databricks`. Empty: `MLFLOW_TRACKING_URI`, or the SQLite file
    `mlflow.db` in `job.output`, with files beside it."""
    counts_interval: int = field(default=100, validator=ge(0))
    """Steps between two files `counts/step-N.json` of what modules count; 0: none."""
    timeout_s: float = field(default=30, validator=gt(0))
    """Longest wait for the server, at the start, where it then is an error, and at the end, where it is a warning."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that the packages are installed that MLflow needs for a database file."""
        if self.uri(job.job.output).startswith("sqlite:") and not (find_spec("sqlalchemy") and find_spec("alembic")):
            message = 'a SQLite file needs SQLAlchemy: pip install "forge-plugin-mlflow[sqlite]"'
            yield Problem("tracking_uri", f"{message}, or give the address of a server")

    def uri(self, output: str) -> str:
        """The tracking URI, defaults filled in."""
        default = f"sqlite:///{Path(output).absolute() / 'mlflow.db'}"
        return self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or default

    def build(self, context: BuildContext) -> Logger:
        """Imports MLflow only here: a job is checked without it."""
        from forge_plugin_mlflow.logger import MLflowLogger

        return MLflowLogger(self, context)
