"""What a run folder has about its run: the process that is using it, `[checkpoint]` of its job, its file of metrics."""

from __future__ import annotations

import fcntl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_core.checkpoint.run_folder import LOCK, RunFolder
from forge_core.job import METRICS


def owner(folder: Path) -> str:
    """The process that owns a run folder at this moment; empty if none does."""
    try:
        with (folder / LOCK).open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # as all who only ask may have at once
            except BlockingIOError:
                return lock.read().strip() or "another process"
            except OSError as error:  # no locks on this file system: callers write where nobody owns a run, so not that
                return f"an unknown process (its lock cannot be asked for: {error.strerror})"
    except FileNotFoundError:  # an owner makes the lock before anything else: without one, nobody owns the run
        return ""
    return ""


def checkpoint_table(folder: Path) -> Mapping[str, Any]:
    """`[checkpoint]` of the resolved job that a run folder keeps; empty before its first start."""
    return RunFolder(folder).job().get("checkpoint", {})


def metrics_file(folder: Path) -> Path:
    """The lines of metrics of a run, where its job's logger `jsonl` writes them; they need not exist yet."""
    loggers = RunFolder(folder).job().get("loggers", {}).items()
    tables = (table for name, table in loggers if table.get("type", name).rpartition("/")[2] == "jsonl")
    return folder / next((table["file"] for table in tables if "file" in table), METRICS)
