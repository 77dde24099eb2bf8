"""Who is using a run folder."""

from __future__ import annotations

import fcntl
from pathlib import Path

from forge_core.checkpoint.run_folder import LOCK


def owner(folder: Path) -> str:
    """The process that owns a run folder at this moment; empty if none does."""
    try:
        with (folder / LOCK).open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # as all who only ask may have at once
            except OSError:
                return lock.read().strip() or "another process"
    except FileNotFoundError:
        pass
    return ""
